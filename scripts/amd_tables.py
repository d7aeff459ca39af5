"""Print the changes that AMD's tuning tables make to core's Triton kernels, by the assembly that they are compiled to.

    python scripts/amd_tables.py [DEVICE ...] [--kernels NAME ...] [--cache FOLDER]

Devices are presets of hardpoint-rocm, by default one of each family that Triton is tried for. Each kernel with a table
is compiled as an engine launches it, in bfloat16 and its formats: in the tiles of core's tables, then with the plugin's
before them. No GPU is needed, and nothing is run: the numbers say what fits a SIMD, not how fast it is. Takes minutes
for a device. ``--cache`` keeps what is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVICES = ("mi210", "mi300x", "mi355x", "rx9070xt")
KERNELS = (
    "decode_attention",
    "prefill_attention",
    "decode_latent_attention",
    "prefill_latent_attention",
    "attend_listed_latents",
    "_gemm",
    "_skinny",
    "_gemv",
    "_int4_matmul",
    "expert_tiles",
    "multiply_tiles",
)
FAMILIES = ("attention", "linear", "experts")
HEAD = ("kernel", "GPU", "scratch, bytes", "registers", "waves of a SIMD", "products without matrix instructions")

Variants = dict[str, list[dict[str, Any]]]
"""The program's report on each variant, by kernel."""


def compiled(device: str, cache: Path, *flags: str) -> tuple[Variants, list[str]]:
    """The variants that an engine on the device would launch, and what the compiler refused."""
    sys.path.insert(0, str(ROOT))
    from tests.kernels.test_launched import contributed

    names = [name for name in contributed("rocm") if name.startswith(FAMILIES)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-m", "tests.kernels.launched", device, "--few", *flags, *names]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found: Variants = defaultdict(list)
    for line in lines:
        if "kernel" in line:
            found[line["kernel"]].append(line)
    return found, [line["failed"] for line in lines if "failed" in line]


def rows(device: str, before: Variants, after: Variants, kernels: Iterable[str]) -> Iterable[tuple[str, ...]]:
    """A row for each kernel: the worst of its variants, before and after."""
    columns: tuple[tuple[Callable[..., Any], Callable[[dict[str, Any]], Any]], ...] = (
        (max, lambda one: one["spilled"]),
        (max, lambda one: one["registers"]),
        (min, lambda one: one["waves"]),
        (sum, lambda one: not one["matrix"] and any(not dot.endswith("f32") for dot in one["dots"])),
    )
    for kernel in kernels:
        if before.get(kernel) and after.get(kernel):
            cells = [[worst(map(value, side[kernel])) for side in (before, after)] for worst, value in columns]
            yield f"`{kernel}`", device, *(f"{old:g} → {new:g}" if old != new else f"{new:g}" for old, new in cells)


def main() -> None:
    """Print a Markdown table, and on stderr what does not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="*", default=DEVICES)
    parser.add_argument("--kernels", nargs="+", default=KERNELS)
    parser.add_argument("--cache", type=Path, default=None)
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    with tempfile.TemporaryDirectory() as folder:
        for device in arguments.devices:
            cache = arguments.cache or Path(folder)
            (before, refused), (after, still) = (compiled(device, cache, *flags) for flags in (("--core-tables",), ()))
            for row in rows(device, before, after, arguments.kernels):
                print(f"| {' | '.join(row)} |", flush=True)
            for when, failures in (("before", refused), ("after", still)):
                for failure in failures:
                    print(f"{device}, {when}: {failure}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
