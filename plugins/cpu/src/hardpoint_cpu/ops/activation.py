"""Activation functions, alone and as gates."""

from __future__ import annotations

import torch

from hardpoint_cpu import native
from hardpoint_cpu.ops.quantize import empty_rounded
from hardpoint_plugin_api import ConfigError, QuantSpec, UnknownNameError

NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "sigmoid": 4}
_GATES = {**NUMBERS, "swiglu_oai": 5}
"""As ``enum class Activation`` of csrc/kernels/activation.h has them."""


def act_and_mul(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """See core's op. Raises UnknownNameError for an activation, ConfigError for rows of odd width."""
    number, width = _gate("act_and_mul", x, activation)
    return _call("act_and_mul", x, torch.empty((*x.shape[:-1], width), dtype=x.dtype), number)


def act_and_mul_quantized(x: torch.Tensor, *, activation: str, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """See core's op; ``spec`` is the one that the manifest claims. Raises as ``act_and_mul``."""
    number, width = _gate("act_and_mul_quantized", x, activation)
    codes, scales = empty_rounded(x.shape[0], width)
    if codes.numel():
        rows = native.rows(x)
        addresses = rows.data_ptr(), codes.data_ptr(), scales.data_ptr()
        native.run(native.number_for("act_and_mul_int8", x.dtype), *addresses, *codes.shape, rows.stride(0), number)
    return codes, scales


def activation(x: torch.Tensor, *, activation: str) -> torch.Tensor:
    """See core's op. Raises UnknownNameError."""
    if activation not in NUMBERS:
        raise UnknownNameError("activation", activation, NUMBERS)
    return _call("activation", x, torch.empty(x.shape, dtype=x.dtype), NUMBERS[activation])


def _gate(op: str, x: torch.Tensor, activation: str) -> tuple[int, int]:
    """The activation's number, and how many elements a row's gate has."""
    if activation not in _GATES:
        raise UnknownNameError("activation", activation, _GATES)
    if x.shape[-1] % 2:
        raise ConfigError(f"{op}: rows must be a gate and as many elements again, got {x.shape[-1]} elements")
    return _GATES[activation], x.shape[-1] // 2


def _call(kernel: str, x: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
    if out.numel():
        rows = native.rows(x)
        native.run(
            native.number_for(kernel, x.dtype),
            rows.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            out.shape[-1],
            rows.stride(0),
            number,
        )
    return out
