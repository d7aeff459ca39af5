"""Samples for the conformance kit: Acme's checkpoint format, calls as Acme's models write them, its own model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, rms_norm, silu

from acme_hp.fading import FadingArgs
from acme_hp.means import FADE, MeanArgs, StripesArgs
from hardpoint.conformance.families.layer_kinds import (
    NUM_STEP_TOKENS,
    STEPS,
    Inputs,
    LayerKind,
    Steps,
    step_by_step,
)
from hardpoint.conformance.families.model_samples import TINY, ModelSample, Reference
from hardpoint.conformance.families.parser_samples import ParserSample, SampleCall, tool
from hardpoint.conformance.families.quantization_samples import Sample, Written
from hardpoint.layers import PluggableLayer
from hardpoint_plugin_api import ContentDelta, ForwardStep


def _groups(rows: int, columns: int, generator: torch.Generator) -> Written:
    codes = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    steps = 0.01 + torch.rand(rows, columns // 32, generator=generator) / 50
    return {"codes": codes, "steps": steps}, codes.float() * steps.repeat_interleave(32, dim=1)


SAMPLES = {"acme_groups": (Sample("groups", {"quant_method": "acme_groups", "group_size": 32}, _groups),)}

_TOOLS = (tool("clock", zone={"type": "string"}), tool("stop"))
_CLOCK = '@clock{"zone": "UTC"}'
TOOL_SAMPLES = {
    "acme": (
        ParserSample(
            "calls",
            f"Late.\n{_CLOCK}\n@stop{{}}",
            (ContentDelta("Late.\n"), SampleCall("clock", '{"zone": "UTC"}'), SampleCall("stop")),
            _TOOLS,
        ),
        ParserSample("no call", "@clock{zone}\nmail@stop{}\n", (ContentDelta("@clock{zone}\nmail@stop{}\n"),), _TOOLS),
    )
}


MEANS = TINY | {"architectures": ["AcmeMeansForCausalLM"], "rms_norm_eps": 1e-6, "acme_period": 3}
"""The config of a tiny model of Acme's."""


def write_means(folder: Path, seed: int) -> Reference:
    """Write a random model to ``folder``; returns its definition in plain torch."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width, values = MEANS["hidden_size"], MEANS["intermediate_size"], 64

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (2 * shape[-1] ** -0.5 if shape[1:] else 0.3) + (not shape[1:])

    w = {"model.embed_tokens.weight": random(MEANS["vocab_size"], hidden), "model.norm.weight": random(hidden)}
    w["lm_head.weight"] = random(MEANS["vocab_size"], hidden)
    for i in range(MEANS["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        w |= {f"{layer}.{name}_layernorm.weight": random(hidden) for name in ("input", "post_attention")}
        mixer = "fading" if i % 2 else "mean"
        w[f"{layer}.{mixer}.value_proj.weight"] = random(values, hidden)
        w[f"{layer}.{mixer}.out_proj.weight"] = random(hidden, values)
        if i % 2:
            w[f"{layer}.stripes"] = random(MEANS["acme_period"], hidden) * 8
        else:
            w |= {f"{layer}.mlp.{name}_proj.weight": random(width, hidden) for name in ("gate", "up")}
            w[f"{layer}.mlp.down_proj.weight"] = random(hidden, width)
    save_file(w, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MEANS))

    def logits(ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        p = {name: x.to(dtype) for name, x in w.items()}
        positions = torch.arange(len(ids))

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return rms_norm(x, (hidden,), p[name], MEANS["rms_norm_eps"])

        x = p["model.embed_tokens.weight"][torch.tensor(ids)]
        for i in range(MEANS["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            mixer = "fading" if i % 2 else "mean"
            v = linear(normed(x, f"{layer}.input_layernorm.weight"), p[f"{layer}.{mixer}.value_proj.weight"])
            ages = positions[:, None] - positions
            faded = torch.tensor(FADE, dtype=dtype) ** ages.clamp(min=0) * (ages >= 0) @ v
            mixed = faded if i % 2 else v.cumsum(0) / (positions[:, None] + 1)
            x = x + linear(mixed, p[f"{layer}.{mixer}.out_proj.weight"])
            y = normed(x, f"{layer}.post_attention_layernorm.weight")
            if i % 2:
                x = x + y * p[f"{layer}.stripes"][positions % MEANS["acme_period"]]
            else:
                gate, up = (linear(y, p[f"{layer}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
                x = x + linear(silu(gate) * up, p[f"{layer}.mlp.down_proj.weight"])
        return linear(normed(x, "model.norm.weight"), p["lm_head.weight"])

    return logits


MODEL_SAMPLES = {"AcmeMeansForCausalLM": (ModelSample("means", write_means),)}


def _stream(
    args: MeanArgs | FadingArgs | StripesArgs, tokens: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(tokens, args.hidden_size, generator=generator), "positions": torch.arange(tokens)}


def _in_a_step(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    return layer(inputs["x"], ForwardStep(inputs["positions"], inputs["positions"], (), ()))


LAYER_KINDS = {
    "acme_mean": LayerKind(
        {"plain": MeanArgs(64, 4, 16)}, _stream, step_by_step, tokens=(NUM_STEP_TOKENS,), pieces=STEPS
    ),
    "acme_fading": LayerKind(
        {"plain": FadingArgs(64, 48, 0.7)}, _stream, step_by_step, tokens=(NUM_STEP_TOKENS,), pieces=STEPS
    ),
    "acme_stripes": LayerKind({"plain": StripesArgs(64, 3)}, _stream, _in_a_step),
}
