"""Each op's reference against Transformers' own function, or a closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_halves

from hardpoint.ops import get, names
from hardpoint.ops.act_and_mul import act_and_mul
from hardpoint.ops.activation import ACTIVATIONS, activation, activation_of_hf
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.base import CustomOp
from hardpoint.ops.linear_recurrence import linear_recurrence_chunks, linear_recurrence_step
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.ops.rotary_embedding import rotary_embedding
from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import NULL_PAGE, UnknownNameError
from tests.ops.judging import DTYPES, cases, failures

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def llama_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    norm = LlamaRMSNorm(x.shape[-1], eps)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    normed: torch.Tensor = norm(x)
    return normed


@by_dtype
@pytest.mark.parametrize("name", names())
def test_references_pass_their_own_cases(name: str, dtype: torch.dtype) -> None:
    op = get(name)
    assert not failures(op, op.reference, dtype)


@by_dtype
@pytest.mark.parametrize("name", names())
def test_cases_have_names_of_their_own_and_are_drawn_afresh(name: str, dtype: torch.dtype) -> None:
    first, second = (list(cases(get(name), dtype, seed)) for seed in (0, 1))
    assert [c.name for c in first] == [c.name for c in second]
    assert len({c.name for c in first}) == len(first)
    tensors = [(a.args[0], b.args[0]) for a, b in zip(first, second, strict=True)]
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in tensors)
    assert any(a.numel() == 0 for a, _ in tensors)


@by_dtype
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    for case in cases(rms_norm, dtype):
        x, weight = case.args
        expected = llama_norm(x, weight, case.kwargs["eps"])
        torch.testing.assert_close(
            rms_norm.reference(x, weight, **case.kwargs), expected, rtol=0, atol=0, equal_nan=True
        )


@by_dtype
def test_add_rms_norm_is_the_sum_then_llamas_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((3, 64), (3, 64), (64,)))
    y, residual_out = add_rms_norm.reference(x, residual, weight, eps=1e-5)
    assert torch.equal(residual_out, x + residual)
    assert torch.equal(y, llama_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize(
    "hidden_act",
    [
        "silu",
        "swish",
        "gelu",
        "gelu_python",
        "gelu_accurate",
        "gelu_fast",
        "gelu_new",
        "gelu_python_tanh",
        "gelu_pytorch_tanh",
        "relu2",
        "sigmoid",
    ],
)
def test_activations_are_transformers_own(hidden_act: str) -> None:
    x = torch.linspace(-8, 8, 1001)
    name = activation_of_hf(hidden_act)
    expected = ACT2FN[hidden_act](x)
    torch.testing.assert_close(activation.reference(x, activation=name), expected, rtol=1e-5, atol=2e-6)
    gate_up = torch.stack([x, x.flip(0)]).flatten()[None]
    torch.testing.assert_close(
        act_and_mul.reference(gate_up, activation=name)[0], expected * x.flip(0), rtol=1e-5, atol=2e-5
    )


def test_every_activation_has_a_name_in_hugging_face() -> None:
    assert {activation_of_hf(name) for name in ("silu", "gelu", "gelu_new", "relu2", "sigmoid")} == set(ACTIVATIONS)


def test_unknown_activations_are_named_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'silu'"):
        activation.reference(torch.zeros(1, 2), activation="sillu")
    with pytest.raises(UnknownNameError, match="known: gelu, gelu_tanh, relu2, sigmoid, silu, swiglu_oai"):
        act_and_mul.reference(torch.zeros(1, 2), activation="mish")
    with pytest.raises(UnknownNameError, match="unknown hidden_act 'quick_gelu'"):
        activation_of_hf("quick_gelu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [32, 64])
def test_rotary_embedding_is_transformers_own(interleaved: bool, rotary: int) -> None:
    q, k, positions = torch.randn(5, 4, 64), torch.randn(5, 2, 64), torch.randint(0, 40, (5,))
    angles = torch.rand(40, rotary // 2) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    cos, sin = (f(torch.cat([angles, angles], dim=-1))[positions] for f in (torch.cos, torch.sin))
    if interleaved:
        expected = rotate_interleaved(q, k, cos, sin)
    else:
        parts = rotate_halves(q[..., :rotary], k[..., :rotary], cos, sin)
        expected = tuple(torch.cat([p, x[..., rotary:]], dim=-1) for p, x in zip(parts, (q, k), strict=True))
    got = rotary_embedding.reference(q, k, positions, table, interleaved=interleaved)
    torch.testing.assert_close(got, tuple(expected))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    """The property that the embedding is made for: q_m . k_n depends on m - n."""
    angles = torch.arange(100, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    q, k = torch.randn(1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 8, dtype=torch.float64)
    scores = []
    for m, n in ((13, 3), (60, 50), (99, 89)):
        turned, _ = rotary_embedding.reference(q, k, torch.tensor([m]), table)
        _, other = rotary_embedding.reference(q, k, torch.tensor([n]), table)
        torch.testing.assert_close(turned.norm(), q.norm())
        scores.append((turned * other).sum())
    torch.testing.assert_close(scores[0], scores[1])
    torch.testing.assert_close(scores[0], scores[2])


def test_store_kv_writes_page_and_offset_and_nothing_else() -> None:
    k, v = torch.arange(6.0).view(3, 1, 2), -torch.arange(6.0).view(3, 1, 2)
    k_cache, v_cache = torch.full((4, 4, 1, 2), 9.0), torch.full((4, 4, 1, 2), 9.0)
    assert store_kv.reference(k, v, k_cache, v_cache, torch.tensor([5, 6, 15], dtype=torch.int32)) is None
    assert k_cache[1, 1].tolist() == [[0.0, 1.0]]
    assert v_cache[1, 2].tolist() == [[-2.0, -3.0]]
    assert k_cache[3, 3].tolist() == [[4.0, 5.0]]
    assert int((k_cache != 9).sum()) == 6


def test_store_kv_rounds_to_the_caches_dtype() -> None:
    k = torch.tensor([[[1.00390625, 448.0]]])
    k_cache, v_cache = torch.zeros(2, 2, 1, 1, 2, dtype=torch.float8_e4m3fn)
    store_kv.reference(k, k, k_cache, v_cache, torch.tensor([1], dtype=torch.int32))
    assert k_cache[1].float().flatten().tolist() == [1.0, 448.0]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_qk_norm_rope_store_is_its_parts_in_turn(normed: bool, rotated: bool) -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    weights: Any = (torch.randn(8), torch.randn(8)) if normed else (None, None)
    positions, table = torch.tensor([4, 5, 6]), torch.randn(9, 8)
    cache = {name: torch.zeros(3, 4, 2, 8) for name in ("k", "v")}
    slots = torch.tensor([4, 5, 8], dtype=torch.int32)
    got = qk_norm_rope_store.reference(
        q, k, v, table if rotated else None, positions, cache, slots, *weights, eps=1e-5, interleaved=False
    )
    if normed:
        q, k = (llama_norm(x, w, 1e-5) for x, w in zip((q, k), weights, strict=True))
    if rotated:
        q, k = rotary_embedding.reference(q, k, positions, table)
    torch.testing.assert_close(got, (q, k))
    torch.testing.assert_close(cache["k"].flatten(0, 1)[slots.long()], k)
    torch.testing.assert_close(cache["v"].flatten(0, 1)[slots.long()], v)


def test_prompts_in_chunks_are_tokens_one_after_the_other() -> None:
    step: Callable[..., torch.Tensor] = linear_recurrence_step.reference
    in_chunks: Callable[..., torch.Tensor] = linear_recurrence_chunks.reference
    for case in cases(linear_recurrence_chunks, torch.float64):
        *inputs, states, pages, starts, lengths = (x.double() if x.is_floating_point() else x for x in case.args)
        kwargs = dict(case.kwargs)
        first = kwargs.pop("starts")
        expected, out = states.clone(), torch.zeros_like(inputs[2])
        counts = starts[1:] - starts[:-1]
        for token in range(int(counts.max()) if len(counts) else 0):
            those = (counts > token).nonzero()[:, 0]
            rows = starts[those].long() + token
            at = lengths[those] - counts[those] + token + 1
            out[rows] = step(*(x[rows] for x in inputs), expected, pages[those], at, **kwargs)
        actual = in_chunks(*inputs, states, pages, starts, lengths, starts=first, **kwargs)
        torch.testing.assert_close(actual, out, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(states, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("op", [linear_recurrence_step, linear_recurrence_chunks], ids=lambda op: op.name)
def test_one_request_of_padding_has_a_defined_result(op: CustomOp[..., Any]) -> None:
    """Kernels advance states in place and in several threads: of more requests with the null page none is defined."""
    found = {case.name: int((case.args[6] == NULL_PAGE).sum()) for case in cases(op, torch.float32)}
    assert max(found.values()) == found["padded"] == 1
