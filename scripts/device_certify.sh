#!/bin/bash
# On a machine with accelerators: certify a plugin's kernels, in parts that its GPUs take from one list.
#   scripts/device_run.sh bash scripts/device_certify.sh FOLDER cuda full attention op linear experts
# Leaves FOLDER/FAMILY.json, and each part's certificate and report beside it. Parts whose certificates are in FOLDER
# already are not run again, and a part that was ended goes on from its finished cases (FOLDER/*.cases), so that a list
# may be worked through in several sessions with that folder, as long as nothing is changed.
# Without accelerators the host takes all parts. Kernels that need several GPUs are run apart, with all of them in sight:
# `hardpoint conform cuda --family communicator`, and `--family op --name cuda_flashinfer_allreduce`.
# Override: PARTS of each family (as many as GPUs); LIMIT, seconds after which runs are ended.
set -um # what runs in the background is a job of its own, so that an interrupt ends it in good order

if [ $# -lt 4 ]; then
    echo "usage: $0 FOLDER PLUGIN LEVEL FAMILY..." >&2
    exit 2
fi
folder=$1 plugin=$2 level=$3
shift 3
mkdir -p "$folder"
count=$(python3 -c 'import torch; print(torch.accelerator.device_count() or 1)')
parts=${PARTS:-$count} limit=${LIMIT:-1000000} jobs=$(($(nproc) / count))
list=$(mktemp -d)
trap 'rm -rf "$list"' EXIT
mkdir "$list/taken"

place() { echo "$folder/$1-$2-of-$parts"; } # of a family's part

line=0
for family in "$@"; do
    for ((number = 1; number <= parts; number++)); do
        line=$((line + 1))
        [ -e "$(place "$family" "$number").json" ] || echo "$family $number" >"$list/$(printf %05d $line)"
    done
done

next() { # takes the first line of the list, which nobody else has taken
    local entry
    for entry in "$list"/[0-9]*; do
        mv "$entry" "$list/taken/" 2>/dev/null && cat "$list/taken/${entry##*/}" && return
    done
    return 1
}

work() { # on GPU $1, until the list or the time is at its end
    local family number began left part
    while left=$((limit - SECONDS)) && [ "$left" -gt 0 ] && read -r family number < <(next); do
        began=$SECONDS part=$(place "$family" "$number")
        CUDA_VISIBLE_DEVICES=$1 timeout --signal INT --kill-after 10 "$left" \
            hardpoint conform "$plugin" --family "$family" --level "$level" --shard "$number/$parts" --jobs "$jobs" \
            --resume "$part.cases" --json "$part.json" >"$part.txt" 2>&1
        echo "$family $number/$parts: $((SECONDS - began)) s: $(grep -e 'checks passed' -e 'interrupted' -e 'error:' "$part.txt")"
        [ ! -e "$part.json" ] || rm -f "$part.cases"
    done
}

for ((gpu = 0; gpu < count; gpu++)); do
    work $gpu &
done
wait
status=0
for family in "$@"; do
    found=("$folder/$family"-*-of-"$parts".json)
    if [ ${#found[@]} -lt "$parts" ] || [ ! -e "${found[0]}" ]; then
        echo "$family: not all of $parts parts are there"
        status=1
        continue
    fi
    hardpoint merge-certificates "${found[@]}" --json "$folder/$family.json" >"$folder/$family.txt" || status=1
    echo "$family: $(grep 'checks passed' "$folder/$family.txt")"
done
exit $status
