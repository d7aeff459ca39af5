"""Ops that change logits before sampling. Axes: N rows, V vocabulary, K tokens with a bias."""

from __future__ import annotations

import torch

from hardpoint_cpu import native
from hardpoint_cpu.ops.arguments import misfit


def mask_tokens(logits: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """See core's op. Raises ConfigError for a mask of another dtype or shape."""
    if forbidden.dtype != torch.bool or forbidden.shape != logits.shape:
        raise misfit("mask_tokens", "forbidden", forbidden, torch.bool, logits.shape)
    out = torch.empty(logits.shape, dtype=logits.dtype)
    if out.numel():
        rows, mask = native.rows(logits), native.rows(forbidden)
        native.run(
            native.number_for("mask_tokens", logits.dtype),
            rows.data_ptr(),
            mask.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            rows.stride(0),
            mask.stride(0),
        )
    return out


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """See core's op. Raises ConfigError for arguments of another dtype or shape."""
    for name, x, dtype, shape in (
        ("in_prompt", in_prompt, torch.bool, logits.shape),
        ("output_counts", output_counts, torch.int32, logits.shape),
        ("repetition", repetition, torch.float32, logits.shape[:1]),
        ("presence", presence, torch.float32, logits.shape[:1]),
        ("frequency", frequency, torch.float32, logits.shape[:1]),
    ):
        if x.dtype != dtype or x.shape != shape:
            raise misfit("apply_penalties", name, x, dtype, shape)
    out = torch.empty(logits.shape, dtype=torch.float32)
    if out.numel():
        rows, prompt, counts = native.rows(logits), native.rows(in_prompt), native.rows(output_counts)
        penalties = [x.contiguous() for x in (repetition, presence, frequency)]
        native.run(
            native.number_for("apply_penalties", logits.dtype),
            rows.data_ptr(),
            prompt.data_ptr(),
            counts.data_ptr(),
            *(x.data_ptr() for x in penalties),
            out.data_ptr(),
            *rows.shape,
            rows.stride(0),
            prompt.stride(0),
            counts.stride(0),
        )
    return out


def apply_logit_bias(logits: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """See core's op. Raises ConfigError for arguments of another dtype or shape."""
    count = logits.shape[0]
    if tokens.dtype != torch.int64 or tokens.ndim != 2 or tokens.shape[0] != count:
        raise misfit("apply_logit_bias", "tokens", tokens, torch.int64, (count, "K"))
    if values.dtype != torch.float32 or values.shape != tokens.shape:
        raise misfit("apply_logit_bias", "values", values, torch.float32, tokens.shape)
    out = torch.empty(logits.shape, dtype=torch.float32)
    if out.numel():
        rows, tokens, values = native.rows(logits), tokens.contiguous(), values.contiguous()
        native.run(
            native.number_for("apply_logit_bias", logits.dtype),
            rows.data_ptr(),
            tokens.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            rows.stride(0),
            tokens.shape[1],
            tokens.stride(0),
            values.stride(0),
        )
    return out
