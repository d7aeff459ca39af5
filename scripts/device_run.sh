#!/bin/sh
# On the accelerator machine: install the wheels of device-bundle/ beside the machine's own packages, FlashInfer's kernels
# where there are some, and run a command.
#   scripts/device_run.sh python3 -m pytest -m accelerator tests
#   scripts/device_run.sh hardpoint generate --platform cuda --prompt "Hello"
# Override: BUNDLE.
set -eu

bundle=${BUNDLE:-"$(dirname "$0")/../device-bundle"}
if [ $# -eq 0 ]; then
    echo "usage: $0 COMMAND [ARGUMENT...]" >&2
    exit 2
fi
if ! ls "$bundle"/*.whl >/dev/null 2>&1; then
    echo "$0: no wheels in $bundle: run scripts/device_bundle.sh first, and carry the folder here" >&2
    exit 2
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$bundle"/*.whl
for library in "$bundle"/flashinfer_kernels/*.so; do # where FlashInfer looks for what was compiled ahead of time
    [ -e "$library" ] || continue
    name=$(basename "$library" .so)
    mkdir -p "$site/flashinfer/data/aot/$name"
    cp "$library" "$site/flashinfer/data/aot/$name/"
done
PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH" "$@"
