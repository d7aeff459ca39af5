"""The sampling kernels: the ops' own cases in the interpreter, what those do not reach, and other devices' code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.kernels import sampling
from hardpoint.ops.base import Case
from hardpoint.ops.judge import judge
from hardpoint.ops.sampling import argmax_tokens, philox_uniform, sample_tokens
from tests.kernels.compiling import TARGETS, Job, compile_kernels
from tests.ops.judging import INTERPRETED, cases

OPS: dict[str, Any] = {"argmax_tokens": argmax_tokens, "philox_uniform": philox_uniform, "sample_tokens": sample_tokens}
LATER = ("sm_100", "gfx942", "gfx950")
"""Targets that the nightly tests compile for."""
ROWS = 5
"""Of a case: the interpreter is slow, and a row is sampled by itself."""


NARROW = {"greedy", "top_p", "all", "mixed", "cold"}
"""Cases of sample_tokens for the narrow dtypes, which change little else than how long a search is."""


def few(op: Any, dtype: torch.dtype) -> Iterator[Case]:
    for case in cases(op, dtype):
        if case.name != "wide" and (op is not sample_tokens or dtype == torch.float32 or case.name in NARROW):
            yield case if op is philox_uniform else replace(case, args=tuple(arg[:ROWS] for arg in case.args))


def failures(op: Any, chosen: list[Case], dtype: torch.dtype) -> str:
    found = [judge(op, getattr(sampling, op.name), case, dtype=dtype) for case in chosen]
    assert found
    return "\n".join(str(verdict) for verdict in found if not verdict.passed)


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("name", OPS)
def test_meets_the_error_model(name: str, dtype: torch.dtype) -> None:
    assert not failures(OPS[name], list(few(OPS[name], dtype)), dtype)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("name", OPS)
def test_meets_the_error_model_in_every_row(name: str, dtype: torch.dtype) -> None:
    assert not failures(OPS[name], list(cases(OPS[name], dtype)), dtype)


@pytest.mark.parametrize("dtype", INTERPRETED)
def test_argmax_of_rows_that_several_programs_share(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 5000).to(dtype)
    logits[0, [17, 1500, 4999]] = 9.0
    logits[1, [3000, 4500]] = float("nan")
    logits[2] = -0.0
    logits[2, 2500:] = 0.0
    logits[3] = float("-inf")
    assert sampling.argmax_tokens(logits).tolist() == [17, 3000, 0, 0]


def drawn(logits: torch.Tensor, **given: float) -> list[int]:
    """The tokens that 8 evenly spaced random numbers draw."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    temperature, top_k, top_p, min_p = (torch.full((8,), float(value)) for value in settings.values())
    uniform = (torch.arange(8) + 0.5) / 8
    tokens = sampling.sample_tokens(logits.expand(8, -1), temperature, top_k.int(), top_p, min_p, uniform)
    return [int(token) for token in tokens]


def test_truncation_keeps_equally_likely_tokens_together() -> None:
    logits = torch.full((600,), -5.0)
    logits[[3, 200, 599]] = 2.0
    assert set(drawn(logits, top_k=1)) == set(drawn(logits, top_p=0.1)) == {3, 200, 599}


@pytest.mark.parametrize("temperature", [1e-38, 1e36, 3.4e38])
def test_temperatures_beside_which_all_logits_are_one_or_far_apart(temperature: float) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 3
    kept = set(logits.topk(5).indices.tolist())
    assert set(drawn(logits, temperature=temperature, top_k=5, top_p=0.9)) <= kept


def test_top_p_is_a_share_of_what_top_k_and_min_p_leave() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(drawn(logits, top_p=0.65)) == {0, 1}
    assert set(drawn(logits, top_p=0.75, min_p=0.4)) == {0, 1}
    assert set(drawn(logits, top_p=0.8, min_p=0.4)) == {0, 1, 2}


def test_random_numbers_that_nothing_truncates_reach_every_tile() -> None:
    assert drawn(torch.zeros(1600)) == [100 + 200 * number for number in range(8)]


def test_rows_that_have_no_finite_highest_logit_take_it() -> None:
    logits = torch.zeros(300)
    logits[200] = float("inf")
    assert set(drawn(logits)) == {200}
    assert set(drawn(torch.full((300,), float("-inf")), top_k=5)) == {0}


def test_few_logits_are_finite() -> None:
    logits = torch.full((400,), float("-inf"))
    logits[[10, 399]] = 0.0
    for settings in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert drawn(logits, **settings) == [10] * 4 + [399] * 4


@pytest.mark.parametrize("target", [pytest.param(t, marks=pytest.mark.nightly if t in LATER else ()) for t in TARGETS])
def test_compiles(target: str) -> None:
    def job(name: str, constexprs: dict[str, Any], num_warps: int, **signature: str) -> Job:
        return Job(f"{sampling.__name__}:{name}", signature, constexprs, target, num_warps)

    logits = {"logits": "*bf16", "stride": "i32:16", "vocabulary": "i32:16"}
    settings = dict.fromkeys(("temperature", "top_p", "min_p", "uniform", "masses"), "*fp32") | {"top_k": "*i32"}
    tiles = {"highest": "*i32", "num_tiles": "i32"}
    row = {"LOW_BITS": 16, "TILE": 128, "ALL_TILES": 2048, "TILES": 32}
    part = {"IS_WHOLE": False, "BLOCK": 4096}
    found = compile_kernels(
        [
            job("_argmax_of_parts", part, 8, **logits, best="*i64", blocks_per_part="i32"),
            job("_tiles_of_rows", {"TILE": 128, "TILES": 8}, 4, **logits, **tiles, temperature="*fp32", masses="*fp32"),
            job("_draw_of_row", row, 8, **logits, **settings, **tiles, listed="*i32", tokens="*i64"),
            job("_philox", {"BLOCK": 128}, 4, seeds="*i64", positions="*i64", out="*fp32", count="i32"),
        ]
    )
    assert not [compiled for compiled in found if compiled.spilled]
