# Hardpoint's server for NVIDIA GPUs. The host needs NVIDIA's driver and its container toolkit. From the repository's root:
#   docker build --file containers/cuda.Dockerfile --tag hardpoint:cuda .
#   docker run --rm --gpus all --ipc host --publish 127.0.0.1:8000:8000 --volume /models:/models:ro \
#       hardpoint:cuda serve /models/NAME --host 0.0.0.0
# --ipc host: several GPUs (--tensor-parallel-size) exchange buffers in shared memory.
# torch brings CUDA's libraries along, so that the base image needs none. TORCH and TRITON are the versions that
# docs/measurements/h200.md was measured with.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY constraints.txt ./
ARG TORCH=2.11.0
ARG TRITON=3.6.0
RUN sed -e "s/^torch==.*/torch==${TORCH}/" -e "s/^triton==.*/triton==${TRITON}/" constraints.txt > pins.txt \
    && python3 -m venv /opt/hardpoint \
    && /opt/hardpoint/bin/pip install --no-cache-dir --constraint pins.txt torch triton
COPY plugin_api plugin_api
COPY core core
COPY plugins/cuda plugins/cuda
ARG EXTRAS=conform,serve
ARG RAY=""
RUN /opt/hardpoint/bin/pip install --no-cache-dir --constraint pins.txt \
        ./plugin_api "./core[${EXTRAS}]" ./plugins/cuda ${RAY:+"${RAY}"}

FROM ${BASE}
# Triton compiles a small C program for each kernel when it first runs. Any compiler of this release will do, and Debian
# keeps no older patch of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home hardpoint
COPY --from=build /opt/hardpoint /opt/hardpoint
ENV PATH=/opt/hardpoint/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /home/hardpoint
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["hardpoint"]
CMD ["serve", "demo", "--platform", "cuda", "--host", "0.0.0.0"]
