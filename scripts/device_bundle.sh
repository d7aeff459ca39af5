#!/bin/sh
# Fill device-bundle/ with the wheels that a bare accelerator machine lacks: ours, and what they need beside the
# torch, triton, numpy, transformers, tokenizers and safetensors that it has. scripts/device_run.sh installs them there.
# KERNELS names a folder of FlashInfer's compiled kernels (scripts/flashinfer_kernels.py makes one), to be carried along.
# Override: PYTHON_VERSION, BUNDLE; FLASHINFER, a version, or empty to leave it out.
set -eu
cd "$(dirname "$0")/.."

python_version=${PYTHON_VERSION:-3.12}
bundle=${BUNDLE:-device-bundle}
flashinfer=${FLASHINFER-0.6.14}
packages="click covertable fastapi httptools hypothesis importlib-metadata jinja2 llguidance nvidia-ml-py packaging pluggy prometheus-client pydantic pytest pytest-xdist rich sybil tomli-w uvicorn"
distributions="plugin_api core plugins/cpu plugins/cuda plugins/rocm plugins/xpu"

rm -rf "$bundle"
mkdir -p "$bundle"

# pip matches each manylinux tag exactly, so all that the machine's glibc admits are named.
download() {
    python3 -m pip download --quiet --disable-pip-version-check --dest "$bundle" --only-binary=:all: \
        --python-version "$python_version" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$@"
}
# shellcheck disable=SC2086  # a list of words
download $packages
if [ -n "$flashinfer" ]; then # attention takes no more of what it requires than this and what the machine has
    download --no-deps "flashinfer-python==$flashinfer" "apache-tvm-ffi<0.2"
fi
if [ -n "${KERNELS:-}" ]; then
    mkdir "$bundle/flashinfer_kernels"
    cp "$KERNELS"/*.so "$bundle/flashinfer_kernels/"
fi

# The machine's CPU may be another than this one's.
export HARDPOINT_CPU_LEVELS=all

# From copies: a build leaves files in its tree, and ships what an earlier one left there.
copies=$(mktemp -d)
trap 'rm -rf "$copies"' EXIT
for distribution in $distributions; do
    copy=$copies/$(basename "$distribution")
    cp -R "$distribution" "$copy"
    rm -rf "$copy/build"
    python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$bundle" "$copy"
done

echo "$(find "$bundle" -name '*.whl' | wc -l) wheels, $(du -sh "$bundle" | cut -f1), in $bundle"
