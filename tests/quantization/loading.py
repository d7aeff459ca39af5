"""How much memory loading takes at most: run as a program, in a process of its own. Linux alone.

``python loading.py SMALL FOLDER [KEY=VALUE ...]`` loads the model in FOLDER with these settings, and prints the bytes
that its slots hold and how far the process's peak rises, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.nn

from hardpoint.checkpoint.formats import open_files
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.layers.base import walk
from hardpoint.layers.loading import load_weights


def peak() -> int:
    """The most memory that this process ever had, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def load(folder: str, settings: dict[str, str]) -> torch.nn.Module:
    """Load a model."""
    blueprint = draw(EngineConfig.create(model=folder, platform="cpu", dtype="bfloat16", **settings))
    model = blueprint.model
    load_weights(model, model.weight_names, open_files(Path(folder)).tensors(), blueprint.ctx.torch_device)
    return model


def main(small: str, folder: str, settings: dict[str, str]) -> None:
    """Measure one load, after one of a ``small`` model, by which all code that it takes has come into memory."""
    load(small, settings)
    before = peak()
    model = load(folder, settings)
    held = {t.untyped_storage().data_ptr(): t.nbytes for _, layer in walk(model) for t in layer.weights.values()}
    print(json.dumps({"held": sum(held.values()), "peak": peak() - before}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], dict(pair.split("=", 1) for pair in sys.argv[3:]))
