# Hardpoint's server for AMD GPUs. Never built and never run: docs/containers.md. The host needs the driver amdgpu.
# From the repository's root, with TORCH_INDEX an index of PyTorch's builds for ROCm (pytorch.org, Get Started):
#   docker build --file containers/rocm.Dockerfile --build-arg TORCH_INDEX=URL --tag hardpoint:rocm .
#   docker run --rm --device /dev/kfd --device /dev/dri --group-add "$(getent group render | cut -d: -f3)" --ipc host \
#       --publish 127.0.0.1:8000:8000 --volume /models:/models:ro hardpoint:rocm serve /models/NAME --host 0.0.0.0
# --group-add: the group of the host that may open /dev/kfd. --ipc host: several GPUs exchange buffers in shared memory.
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY constraints.txt ./
ARG TORCH_INDEX
RUN python3 -m venv /opt/hardpoint \
    && /opt/hardpoint/bin/pip install --no-cache-dir \
        --index-url "${TORCH_INDEX:?give --build-arg TORCH_INDEX=URL, an index of builds of PyTorch for ROCm}" \
        "$(grep '^torch==' constraints.txt)"
COPY plugin_api plugin_api
COPY core core
COPY plugins/rocm plugins/rocm
ARG EXTRAS=conform,serve
RUN /opt/hardpoint/bin/pip install --no-cache-dir --constraint constraints.txt \
        ./plugin_api "./core[${EXTRAS}]" ./plugins/rocm
# The build fails here if another requirement replaced PyTorch by its build for CUDA, or brought the stock Triton.
RUN /opt/hardpoint/bin/pip freeze > installed.txt \
    && grep -E '^torch==[^+]+[+]rocm' installed.txt \
    && ! grep -E '^triton==[0-9.]+$' installed.txt

FROM ${BASE}
# Triton compiles a small C program for each kernel when it first runs. Any compiler of this release will do, and Debian
# keeps no older patch of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home hardpoint
COPY --from=build /opt/hardpoint /opt/hardpoint
ENV PATH=/opt/hardpoint/bin:$PATH
USER 10001:10001
WORKDIR /home/hardpoint
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["hardpoint"]
CMD ["serve", "demo", "--platform", "rocm", "--host", "0.0.0.0"]
