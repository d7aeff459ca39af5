# Hardpoint's server for CPUs. From the repository's root:
#   docker build --file containers/cpu.Dockerfile --tag hardpoint:cpu .
#   docker run --rm --publish 127.0.0.1:8000:8000 hardpoint:cpu
# Another model, from a folder of the host:
#   docker run --rm --publish 127.0.0.1:8000:8000 --volume /models:/models:ro hardpoint:cpu serve /models/NAME --host 0.0.0.0
# TORCH_INDEX is an index of PyTorch's builds for CPUs; without it pip takes a build with gigabytes of CUDA libraries.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
# Any compiler of this release will do, and Debian keeps no older patch of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY constraints.txt ./
ARG TORCH_INDEX=""
RUN python3 -m venv /opt/hardpoint \
    && /opt/hardpoint/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
        "$(grep '^torch==' constraints.txt)"
COPY plugin_api plugin_api
COPY core core
COPY plugins/cpu plugins/cpu
# The machine that runs the image may have another CPU than the one that builds it.
RUN HARDPOINT_CPU_LEVELS=all /opt/hardpoint/bin/pip install --no-cache-dir --constraint constraints.txt \
        ./plugin_api './core[conform,serve]' ./plugins/cpu

FROM ${BASE}
RUN useradd --uid 10001 --create-home hardpoint
COPY --from=build /opt/hardpoint /opt/hardpoint
ENV PATH=/opt/hardpoint/bin:$PATH
USER 10001:10001
WORKDIR /home/hardpoint
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["hardpoint"]
CMD ["serve", "demo", "--platform", "cpu", "--host", "0.0.0.0"]
