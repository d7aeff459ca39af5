"""The judge accepts other right formulations and rejects planted faults, in every dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from hardpoint.ops import get
from hardpoint.ops.act_and_mul import act_and_mul
from hardpoint.ops.activation import activation
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.base import functional_from_out, poisoned
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.ops.rotary_embedding import rotary_embedding
from hardpoint.ops.sampling import philox_uniform, sample_tokens
from hardpoint.ops.store_kv import store_kv
from tests.ops.judging import DTYPES, failures

Tensor = torch.Tensor
Implementation = Callable[..., Any]

norm, add_norm, rotate, store = (
    rms_norm.reference,
    add_rms_norm.reference,
    rotary_embedding.reference,
    store_kv.reference,
)
fused: Callable[..., tuple[Tensor, Tensor]] = qk_norm_rope_store.reference
gated, ungated = act_and_mul.reference, activation.reference


# Other right formulations.


def norm_in_one_rounding(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As many kernels do: float32 to the end."""
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()).to(x.dtype)


def norm_by_partial_sums(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Each of 32 lanes adds its squares one after another; the lanes are added last."""
    padded = functional.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    lanes = padded[..., 0, :].square()
    for i in range(1, padded.shape[-2]):
        lanes = lanes + padded[..., i, :].square()
    return (x.float() * torch.rsqrt(lanes.sum(-1, keepdim=True) / x.shape[-1] + eps)).to(x.dtype) * weight


def norm_of_the_unrounded_sum(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return norm_in_one_rounding(total, weight, eps=eps).to(x.dtype), total.to(x.dtype)


def norm_into_the_residual(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    residual += x
    return norm(residual, weight, eps=eps), residual


def gated_in_one_rounding(x: Tensor, *, activation: str) -> Tensor:
    return gated(x.float(), activation=activation).to(x.dtype)


def written_out(x: Tensor, *, activation: str) -> Tensor:
    """The textbooks' formulas, in float32."""
    wide = x.float()
    match activation:
        case "silu":
            y = wide / (1 + torch.exp(-wide))
        case "gelu":
            y = 0.5 * wide * torch.erfc(-wide * math.sqrt(0.5))
        case "gelu_tanh":
            y = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        case "sigmoid":
            y = 1 / (1 + torch.exp(-wide))
        case _:
            y = wide.clamp(min=0) ** 2
    return y.to(x.dtype)


def rotate_by_complex_numbers(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    half = cos_sin.shape[-1] // 2
    turn = torch.complex(cos_sin[:, :half], cos_sin[:, half:])[positions][:, None]

    def turned(x: Tensor) -> Tensor:
        pairs = x[..., : 2 * half].float()
        pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
        result = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
        flat = result.flatten(-2) if interleaved else result.transpose(-1, -2).flatten(-2)
        return torch.cat([flat.to(x.dtype), x[..., 2 * half :]], dim=-1)

    return turned(q), turned(k)


def rotate_in_the_own_dtype(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """The table rounded to the activations' dtype, as widely used kernels do."""
    return rotate(q, k, positions, cos_sin.to(q.dtype), interleaved=interleaved)


def rotate_in_place(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    turned = rotate(q, k, positions, cos_sin, interleaved=interleaved)
    return q.copy_(turned[0]), k.copy_(turned[1])


def store_row_by_row(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    for row, slot in enumerate(slot_mapping.tolist()):
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[slot // cache.shape[1], slot % cache.shape[1]] = new[row].to(cache.dtype)


def store_without_padding(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    real = slot_mapping >= k_cache.shape[1]
    store(k[real], v[real], k_cache, v_cache, slot_mapping[real])


def sample_in_float64(logits: Tensor, *settings: Tensor) -> Tensor:
    wide = (s.double() if s.dtype == torch.float32 else s for s in settings)
    return sample_tokens.reference(logits.double(), *wide)


RIGHT: list[tuple[str, Implementation]] = [
    ("rms_norm", norm_in_one_rounding),
    ("rms_norm", norm_by_partial_sums),
    ("add_rms_norm", norm_of_the_unrounded_sum),
    ("add_rms_norm", norm_into_the_residual),
    ("act_and_mul", gated_in_one_rounding),
    ("activation", written_out),
    ("rotary_embedding", rotate_by_complex_numbers),
    ("rotary_embedding", rotate_in_place),
    ("store_kv", store_row_by_row),
    ("store_kv", store_without_padding),
    ("sample_tokens", sample_in_float64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "implementation"), RIGHT, ids=lambda x: getattr(x, "__name__", x))
def test_right_formulations_pass(name: str, implementation: Implementation, dtype: torch.dtype) -> None:
    assert not failures(get(name), implementation, dtype)


# Faults. Each is named by what it does wrong.


def half_precision_sum(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Squares added one after another in half precision, whatever x is."""
    half = x.to(torch.bfloat16 if x.dtype == torch.float32 else x.dtype)
    total = torch.zeros(*x.shape[:-1], 1, dtype=half.dtype)
    for i in range(0, x.shape[-1], 8):
        total = total + half[..., i : i + 8].square().sum(-1, keepdim=True)
    return (x.float() * torch.rsqrt(total.float() / x.shape[-1] + eps)).to(x.dtype) * weight


def wrong_eps(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x, weight, eps=1e-6 if eps == 1e-5 else 1e-5)


def eps_outside_the_root(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight.float()).to(x.dtype)


def weight_ignored(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x, torch.ones_like(weight), eps=eps)


def mean_subtracted(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x - x.mean(-1, keepdim=True), weight, eps=eps)


def two_percent_off(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return (norm(x, weight, eps=eps).float() * 1.02).to(x.dtype)


def nan_swallowed(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x.nan_to_num(0.0), weight, eps=eps)


def last_element_forgotten(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = norm(x, weight, eps=eps)
    y[..., -1:] = 0
    return y


def last_row_forgotten(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    def out_form(x: Tensor, weight: Tensor, y: Tensor, *, eps: float) -> None:
        y[:-1] = norm(x, weight, eps=eps)[:-1]

    return functional_from_out(out_form, poisoned(rms_norm.allocate or norm), norm)(x, weight, eps=eps)


def input_mutated(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = norm(x, weight, eps=eps)
    x.mul_(1.5)
    return y


def returned_in_the_input(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x.copy_(norm(x, weight, eps=eps))


def wrong_dtype(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x, weight, eps=eps).to(torch.float64)


class StaleOutput:
    """Remembers its first answer for each shape."""

    __name__ = "stale_output"

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if tuple(x.shape) not in self.seen:
            self.seen[tuple(x.shape)] = norm(x, weight, eps=eps)
        return self.seen[tuple(x.shape)].clone()


def residual_left_alone(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    return add_norm(x, residual, weight, eps=eps)[0], residual.clone()


def residual_changed_but_not_returned(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    y, total = add_norm(x, residual, weight, eps=eps)
    residual.copy_(total)
    return y, total


def norm_returned_twice(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    y, _ = add_norm(x, residual, weight, eps=eps)
    return y, y.clone()


def one_output_missing(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return add_norm(x, residual, weight, eps=eps)[0]


def gate_and_up_swapped(x: Tensor, *, activation: str) -> Tensor:
    return gated(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), activation=activation)


def interleaved_gate_and_up(x: Tensor, *, activation: str) -> Tensor:
    return gated(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), activation=activation)


def silu_for_everything(x: Tensor, *, activation: str) -> Tensor:
    return gated(x, activation="silu")


def relu_not_squared(x: Tensor, *, activation: str) -> Tensor:
    return functional.relu(x) if activation == "relu2" else ungated(x, activation=activation)


def gelus_swapped(x: Tensor, *, activation: str) -> Tensor:
    other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}
    return ungated(x, activation=other.get(activation, activation))


def sigmoid_alone(x: Tensor, *, activation: str) -> Tensor:
    return torch.sigmoid(x) if activation == "silu" else ungated(x, activation=activation)


def nan_lost_in_maximum(x: Tensor, *, activation: str) -> Tensor:
    if activation == "relu2":
        return torch.fmax(x, torch.zeros_like(x)).square()
    return ungated(x, activation=activation)


def pairs_confused(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return rotate(q, k, positions, cos_sin, interleaved=not interleaved)


def tail_rotated(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    rotary = cos_sin.shape[-1]

    def turned(x: Tensor, y: Tensor) -> Tensor:
        if rotary == x.shape[-1]:
            return y
        return torch.cat([x[..., : x.shape[-1] - rotary], y[..., :rotary]], dim=-1)

    return tuple(  # type: ignore[return-value]  # of the two
        turned(x, y) for x, y in zip((q, k), rotate(q, k, positions, cos_sin, interleaved=interleaved), strict=True)
    )


def tail_zeroed(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    q, k = rotate(q, k, positions, cos_sin, interleaved=interleaved)
    q[..., cos_sin.shape[-1] :] = 0
    return q, k


def last_pair_not_rotated(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    half = cos_sin.shape[-1] // 2
    table = cos_sin.clone()
    table[:, half - 1], table[:, -1] = 1.0, 0.0
    return rotate(q, k, positions, table, interleaved=interleaved)


def turned_backwards(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    half = cos_sin.shape[-1] // 2
    table = torch.cat([cos_sin[:, :half], -cos_sin[:, half:]], dim=-1)
    return rotate(q, k, positions, table, interleaved=interleaved)


def position_off_by_one(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return rotate(q, k, (positions - 1).clamp(min=0), cos_sin, interleaved=interleaved)


def keys_not_rotated(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return rotate(q, k, positions, cos_sin, interleaved=interleaved)[0], k.clone()


def next_row_looked_up(ids: Tensor, weight: Tensor) -> Tensor:
    return weight[(ids + 1) % weight.shape[0]]


def ids_cut_to_16_bits(ids: Tensor, weight: Tensor) -> Tensor:
    return weight[ids.to(torch.int16).long()]


def slot_off_by_one(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    store(k, v, k_cache, v_cache, slot_mapping - 1)


def keys_and_values_swapped(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    store(v, k, k_cache, v_cache, slot_mapping)


def page_and_offset_confused(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    block, pages = k_cache.shape[1], k_cache.shape[0]
    store(k, v, k_cache, v_cache, slot_mapping % pages * block + slot_mapping // pages % block)


def whole_page_cleared(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    k_cache[slot_mapping.long() // k_cache.shape[1]] = 0
    store(k, v, k_cache, v_cache, slot_mapping)


def truncated_instead_of_rounded(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    def cut(x: Tensor, cache: Tensor) -> Tensor:
        rounded = x.float().view(torch.int32) & ~0xFFFF
        return rounded.view(torch.float32) if cache.dtype == torch.bfloat16 else x

    store(cut(k, k_cache), cut(v, v_cache), k_cache, v_cache, slot_mapping)


def values_not_stored(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    store(k, v, k_cache, v_cache.clone(), slot_mapping)


def wrote_beside_the_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    store(k, v, k_cache, v_cache, slot_mapping)
    slot_mapping.clamp_(max=3)


def keys_stored_before_rotation(
    q: Tensor, k: Tensor, v: Tensor, table: Any, positions: Tensor, cache: Any, slots: Tensor, *rest: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    result = fused(q, k, v, table, positions, cache, slots, *rest, **kwargs)
    store(k, v, cache["k"], cache["v"], slots)
    return result


def weights_of_q_and_k_swapped(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return fused(*args[:7], args[8], args[7], **kwargs)


def normed_after_rotation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Any,
    positions: Tensor,
    cache: Any,
    slots: Tensor,
    q_weight: Any,
    k_weight: Any,
    *,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    if table is not None:
        q, k = rotate(q, k, positions, table, interleaved=interleaved)
    return fused(q, k, v, None, positions, cache, slots, q_weight, k_weight, eps=eps, interleaved=interleaved)


def last_of_the_likeliest(logits: Tensor) -> Tensor:
    return logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)


def temperature_ignored(logits: Tensor, temperature: Tensor, *settings: Tensor) -> Tensor:
    return sample_tokens.reference(logits, (temperature != 0).float(), *settings)


def top_k_ignored(logits: Tensor, temperature: Tensor, top_k: Tensor, *rest: Tensor) -> Tensor:
    return sample_tokens.reference(logits, temperature, torch.zeros_like(top_k), *rest)


def top_p_ignored(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *rest: Tensor) -> Tensor:
    return sample_tokens.reference(logits, temperature, top_k, torch.ones_like(top_p), *rest)


def min_p_ignored(logits: Tensor, temperature: Tensor, k: Tensor, p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    return sample_tokens.reference(logits, temperature, k, p, torch.zeros_like(min_p), u)


def always_greedy(logits: Tensor, *settings: Tensor) -> Tensor:
    return logits.argmax(-1)


def low_word_of_the_seed_alone(seeds: Tensor, positions: Tensor) -> Tensor:
    return philox_uniform.reference(seeds & 0xFFFFFFFF, positions)


def another_generator(seeds: Tensor, positions: Tensor) -> Tensor:
    return torch.rand(seeds.shape)


def zeros(name: str) -> Implementation:
    """All outputs zero."""
    reference = get(name).reference

    def all_zero(*args: Any, **kwargs: Any) -> Any:
        result = reference(*args, **kwargs)
        return tuple(map(torch.zeros_like, result)) if isinstance(result, tuple) else torch.zeros_like(result)

    return all_zero


WRONG: list[tuple[str, Implementation]] = [
    *((name, zeros(name)) for name in ("rms_norm", "add_rms_norm", "act_and_mul", "activation", "rotary_embedding")),
    *((name, zeros(name)) for name in ("qk_norm_rope_store", "argmax_tokens", "philox_uniform", "sample_tokens")),
    ("rms_norm", half_precision_sum),
    ("rms_norm", wrong_eps),
    ("rms_norm", eps_outside_the_root),
    ("rms_norm", weight_ignored),
    ("rms_norm", mean_subtracted),
    ("rms_norm", two_percent_off),
    ("rms_norm", nan_swallowed),
    ("rms_norm", last_element_forgotten),
    ("rms_norm", last_row_forgotten),
    ("rms_norm", input_mutated),
    ("rms_norm", returned_in_the_input),
    ("rms_norm", wrong_dtype),
    ("rms_norm", StaleOutput()),
    ("add_rms_norm", residual_left_alone),
    ("add_rms_norm", residual_changed_but_not_returned),
    ("add_rms_norm", norm_returned_twice),
    ("add_rms_norm", one_output_missing),
    ("act_and_mul", gate_and_up_swapped),
    ("act_and_mul", interleaved_gate_and_up),
    ("act_and_mul", silu_for_everything),
    ("activation", relu_not_squared),
    ("activation", gelus_swapped),
    ("activation", sigmoid_alone),
    ("activation", nan_lost_in_maximum),
    ("rotary_embedding", pairs_confused),
    ("rotary_embedding", tail_rotated),
    ("rotary_embedding", tail_zeroed),
    ("rotary_embedding", last_pair_not_rotated),
    ("rotary_embedding", turned_backwards),
    ("rotary_embedding", position_off_by_one),
    ("rotary_embedding", keys_not_rotated),
    ("rotary_embedding", rotate_in_the_own_dtype),
    ("embedding_lookup", next_row_looked_up),
    ("embedding_lookup", ids_cut_to_16_bits),
    ("store_kv", slot_off_by_one),
    ("store_kv", keys_and_values_swapped),
    ("store_kv", page_and_offset_confused),
    ("store_kv", whole_page_cleared),
    ("store_kv", truncated_instead_of_rounded),
    ("store_kv", values_not_stored),
    ("store_kv", wrote_beside_the_cache),
    ("qk_norm_rope_store", keys_stored_before_rotation),
    ("qk_norm_rope_store", weights_of_q_and_k_swapped),
    ("qk_norm_rope_store", normed_after_rotation),
    ("argmax_tokens", last_of_the_likeliest),
    ("sample_tokens", temperature_ignored),
    ("sample_tokens", top_k_ignored),
    ("sample_tokens", top_p_ignored),
    ("sample_tokens", min_p_ignored),
    ("sample_tokens", always_greedy),
    ("philox_uniform", low_word_of_the_seed_alone),
    ("philox_uniform", another_generator),
]

INDISTINCT = {
    (rotate_in_the_own_dtype, torch.float32),  # it is the right one there
    (truncated_instead_of_rounded, torch.bfloat16),  # nothing is cut from a number that fits
}
"""Faults that make no difference in a dtype."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "implementation"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_planted_faults_are_found(name: str, implementation: Implementation, dtype: torch.dtype) -> None:
    found = failures(get(name), implementation, dtype)
    assert bool(found) != ((implementation, dtype) in INDISTINCT)
