# Hardpoint's server for Intel GPUs. Never built and never run: docs/containers.md. The host needs the driver xe or i915.
# From the repository's root:
#   docker build --file containers/xpu.Dockerfile --tag hardpoint:xpu .
#   docker run --rm --device /dev/dri --group-add "$(getent group render | cut -d: -f3)" --ipc host \
#       --publish 127.0.0.1:8000:8000 --volume /models:/models:ro hardpoint:xpu serve /models/NAME --host 0.0.0.0
# --group-add: the group of the host that may open /dev/dri/renderD*. --ipc host: several GPUs exchange buffers in shared
# memory. Debian 13, since Intel builds its driver's packages against a newer C library than that of Debian 12.
ARG BASE=python:3.12.12-slim-trixie

FROM ${BASE} AS build
WORKDIR /source
COPY constraints.txt ./
# PyTorch's builds for Intel GPUs, with its SYCL runtime and its Triton.
ARG TORCH_INDEX=https://download.pytorch.org/whl/xpu
RUN python3 -m venv /opt/hardpoint \
    && /opt/hardpoint/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"
COPY plugin_api plugin_api
COPY core core
COPY plugins/xpu plugins/xpu
ARG EXTRAS=conform,serve
ARG XPU_EXTRAS=kernels
RUN /opt/hardpoint/bin/pip install --no-cache-dir --constraint constraints.txt \
        ./plugin_api "./core[${EXTRAS}]" "./plugins/xpu[${XPU_EXTRAS}]"
# The build fails here if another requirement replaced PyTorch by its build for CUDA, or brought the stock Triton.
RUN /opt/hardpoint/bin/pip freeze > installed.txt \
    && grep -E '^torch==[^+]+[+]xpu' installed.txt \
    && ! grep -E '^triton==[0-9.]+$' installed.txt

FROM ${BASE}
# The part of Intel's driver that runs in the process: Debian 13 has the Level Zero loader (libze1), and not the driver
# behind it. These versions are those of vLLM's image for Intel GPUs (docker/Dockerfile.xpu, 05cb1bc2).
ARG COMPUTE_RUNTIME=25.48.36300.8
ARG GRAPHICS_COMPILER=2.24.8
ARG GRAPHICS_COMPILER_BUILD=20344
ARG GMM=22.8.2
ADD https://github.com/intel/intel-graphics-compiler/releases/download/v${GRAPHICS_COMPILER}/intel-igc-core-2_${GRAPHICS_COMPILER}+${GRAPHICS_COMPILER_BUILD}_amd64.deb \
    https://github.com/intel/intel-graphics-compiler/releases/download/v${GRAPHICS_COMPILER}/intel-igc-opencl-2_${GRAPHICS_COMPILER}+${GRAPHICS_COMPILER_BUILD}_amd64.deb \
    https://github.com/intel/compute-runtime/releases/download/${COMPUTE_RUNTIME}/libigdgmm12_${GMM}_amd64.deb \
    https://github.com/intel/compute-runtime/releases/download/${COMPUTE_RUNTIME}/libze-intel-gpu1_${COMPUTE_RUNTIME}-0_amd64.deb \
    /driver/
# Triton compiles a small C++ program for each kernel when it first runs. Any compiler of this release will do, and Debian
# keeps no older patch of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev libze1 libze-dev /driver/*.deb \
    && rm -rf /var/lib/apt/lists/* /driver \
    && useradd --uid 10001 --create-home hardpoint
COPY --from=build /opt/hardpoint /opt/hardpoint
ENV PATH=/opt/hardpoint/bin:$PATH
USER 10001:10001
WORKDIR /home/hardpoint
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["hardpoint"]
CMD ["serve", "demo", "--platform", "xpu", "--host", "0.0.0.0"]
