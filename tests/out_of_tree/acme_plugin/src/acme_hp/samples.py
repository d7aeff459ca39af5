"""Acme's checkpoint format for the conformance kit: matrices as its tool stores them, and what they mean."""

from __future__ import annotations

import torch

from hardpoint.conformance.families.quantization_samples import Sample, Written


def _groups(rows: int, columns: int, generator: torch.Generator) -> Written:
    codes = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    steps = 0.01 + torch.rand(rows, columns // 32, generator=generator) / 50
    return {"codes": codes, "steps": steps}, codes.float() * steps.repeat_interleave(32, dim=1)


SAMPLES = {"acme_groups": (Sample("groups", {"quant_method": "acme_groups", "group_size": 32}, _groups),)}
