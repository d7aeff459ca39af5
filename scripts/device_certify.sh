#!/bin/bash
# On a machine with accelerators: certify a plugin's kernels, family by family, a shard on each GPU at the same time.
#   scripts/device_run.sh bash scripts/device_certify.sh FOLDER cuda quick attention op linear experts
# Without accelerators there is one shard, on the host. Leaves FOLDER/FAMILY.json, and each shard's report beside it.
# Kernels that need several GPUs are run apart, with all of them in sight: `hardpoint conform cuda --family communicator`.
set -um # shards are jobs of their own, so that an interrupt ends them in good order

if [ $# -lt 4 ]; then
    echo "usage: $0 FOLDER PLUGIN LEVEL FAMILY..." >&2
    exit 2
fi
folder=$1 plugin=$2 level=$3
shift 3
mkdir -p "$folder"
count=$(python3 -c 'import torch; print(torch.accelerator.device_count() or 1)')
jobs=$(($(nproc) / count))
status=0
for family in "$@"; do
    began=$(date +%s)
    for ((number = 1; number <= count; number++)); do
        CUDA_VISIBLE_DEVICES=$((number - 1)) hardpoint conform "$plugin" --family "$family" --level "$level" \
            --shard "$number/$count" --jobs "$jobs" --json "$folder/$family-$number.json" \
            >"$folder/$family-$number.txt" 2>&1 &
    done
    wait
    hardpoint merge-certificates "$folder/$family"-[0-9]*.json --json "$folder/$family.json" >"$folder/$family.txt" || status=1
    echo "$family: $(($(date +%s) - began)) s: $(grep 'checks passed' "$folder/$family.txt")"
done
exit $status
