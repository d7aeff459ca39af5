"""Layers with a state, in Triton: the recurrence, and what surrounds it."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import recurrence, state_inputs
from tests.kernels.compiling import PAIRS_OF_TARGETS, Job, compile_kernels
from tests.kernels.judged import failures, variants

MODULES = {
    "causal_conv": state_inputs,
    "gated_rms_norm": state_inputs,
    "linear_recurrence_chunks": recurrence,
    "linear_recurrence_step": recurrence,
    "recurrence_gates": state_inputs,
}


@pytest.mark.parametrize(("name", "dtype", "device"), variants(*MODULES))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    long = {
        "linear_recurrence_chunks": ("long", "wide", "chunks", "fast_decay", "no_decay", "channel_fast"),
        "causal_conv": ("many_channels", "prompts"),
        "linear_recurrence_step": ("wide", "many"),
    }
    failed = failures(name, getattr(MODULES[name], name), dtype, device, long)
    assert not failed, "\n".join(failed)


def jobs(target: str) -> list[Job]:
    """The shapes of Qwen3-Next."""
    arrays = {"pages_ptr": "*i64:1", "starts_ptr": "*i32:1", "lengths_ptr": "*i32:1"}
    state = {"states_ptr": "*fp32", "page_stride": "i32:16", **arrays}
    recurrence = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
    recurrence |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32") | {"scale": "fp32", **state}
    recurrence |= dict.fromkeys(("decay_ptr", "beta_ptr"), "*fp32:1")
    sizes = {"H": 32, "K": 16, "D": 128, "V": 128, "BLOCK_D": 128, "BLOCK_V": 32, "NORMALIZE": True}
    rule = {"DELTA_RULE": True, "CHANNEL_DECAY": False, "IN_CHUNKS": True, "PRECISION": "bf16x6"}
    conv = {"x_ptr": "*bf16", "states_ptr": "*bf16", "x_stride": "i32", "page_stride": "i32:16", **arrays}
    every = {**conv, "weight_ptr": "*bf16:1", "out_ptr": "*bf16", "num_requests": "i32"}
    channels = {"C": 8192, "W": 4, "BLOCK": 512}
    gates = {"a_ptr": "*bf16", "b_ptr": "*bf16", "rate_ptr": "*fp32:1", "bias_ptr": "*fp32:1", "decay_ptr": "*fp32"}
    gates |= {"beta_ptr": "*fp32", "a_stride": "i32", "b_stride": "i32", "low": "fp32"}
    norm = {"x_ptr": "*bf16", "gate_ptr": "*bf16", "weight_ptr": "*bf16:1", "out_ptr": "*bf16", "gate_stride": "i32"}
    gate = {"G": 32, "SIZE": 128, "ONE_WEIGHT": True, "ACTIVATION": "silu", "GATE_FIRST": False, "BLOCK": 128}
    first, second = "hardpoint.kernels.recurrence:", "hardpoint.kernels.state_inputs:"
    one, conv_of_decodes = {"starts_ptr": None}, {"bias_ptr": None, "ACTIVATION": "silu", "ONE": True}
    return [
        Job(f"{first}recurrence_kernel", recurrence, {**sizes, **rule, "BLOCK_V": 16}, target, 8, 1),
        Job(
            f"{first}recurrence_kernel",
            {name: kind for name, kind in recurrence.items() if name not in one},
            {**sizes, **rule, **one, "IN_CHUNKS": False},
            target,
            4,
            1,
        ),
        Job(f"{second}conv_kernel", every, {**channels, **conv_of_decodes}, target, 4, 1),
        Job(f"{second}conv_states_kernel", conv, channels, target, 4, 1),
        Job(f"{second}gates_kernel", gates, {"H": 32, "CHANNELS": 1, "BLOCK_H": 32, "BLOCK_D": 1}, target, 4, 1),
        Job(f"{second}gated_norm_kernel", {**norm, "eps": "fp32"}, gate, target, 1, 1),
    ]


@pytest.mark.parametrize("targets", PAIRS_OF_TARGETS)
def test_compiled_for_devices(targets: tuple[str, ...]) -> None:
    """Cards of both makers."""
    for one in compile_kernels([job for target in targets for job in jobs(target)], seconds=300):
        assert one.spilled == 0, one
