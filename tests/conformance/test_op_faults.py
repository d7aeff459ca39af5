"""Faults planted in kernels of ops: each is caught, by the check that should; healthy kernels pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from hardpoint.conformance.families.ops import OpTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.qk_norm_rope_store import compose
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.ops.rotary_embedding import rotary_embedding
from hardpoint.ops.slot_mapping import slot_mapping
from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import OpWorkload, Platform
from tests.conformance.trying import FEWER, Caught, first_failure, subject
from tests.support import raw_kernels

Tensor = torch.Tensor
norm = rms_norm.reference


# Kernels of rms_norm. A class holds what such a kernel would keep between calls.


def healthy(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """float32 to the end, one rounding."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def healthy_out(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    out.copy_(healthy(x, weight, eps=eps))


def no_eps(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x, weight, eps=0.0)


def half_accumulation(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """The sum of squares is rounded to half precision after each of a few partial sums."""
    squares = x.square()
    total = torch.zeros_like(squares[..., :1])
    for part in squares.split(16, dim=-1):
        total = total + part.sum(-1, keepdim=True)
    return x * torch.rsqrt(total / x.shape[-1] + eps) * weight


def scale_inverted(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x, 1 / weight, eps=eps)


def zeros_for_small(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """A result that any absolute tolerance of a percent would accept."""
    y = norm(x, weight, eps=eps)
    return torch.where(x.abs().nan_to_num().amax() < 1e-2, torch.zeros_like(y), y) if y.numel() else y


def wrong_at_one_width(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """A tuning entry of its own, for a common hidden size, whose last tile is left out of the sum of squares."""
    if x.shape[-1] != 4096:
        return norm(x, weight, eps=eps)
    wide = x.float()
    mean = wide[..., :-64].square().sum(-1, keepdim=True) / 4096
    return (weight * (wide * torch.rsqrt(mean + eps)).to(x.dtype)).to(x.dtype)


def damages_input(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = norm(x, weight, eps=eps)
    if x.numel():
        x[..., 0] = y[..., 0]
    return y


def returns_its_input(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x.copy_(norm(x, weight, eps=eps))


def wrong_dtype(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x, weight, eps=eps).double()


def skips_last_row(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    out[:-1] = norm(x[:-1], weight, eps=eps)


def writes_behind_its_output(x: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    out.copy_(norm(x, weight, eps=eps))
    if out.numel():
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()


def reads_as_if_contiguous(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Right for contiguous inputs and for the strided one of the op's own cases, but not for rows that lie apart."""
    rows_apart = x.dim() == 2 and x.stride(-1) == 1 and x.stride(0) == x.shape[1] + 11
    flat = x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()) if rows_apart else x
    return norm(flat, weight, eps=eps)


def begins_at_an_aligned_address(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Vector loads that drop the low bits of the address."""
    shift = x.data_ptr() % 16 // x.element_size()
    aligned = x.as_strided(x.shape, x.stride(), x.storage_offset() - shift) if x.numel() else x
    return norm(aligned, weight, eps=eps)


def offsets_of_32_bits(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = norm(x, weight, eps=eps)
    far = x.dim() == 2 and (x.shape[0] - 1) * x.stride(0) >= 2**31
    if far:
        y[-1] = 0
    return y


def unfilled_scratch(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Partial sums are added into memory that nobody cleared, but which the system hands out full of zeros.

    It is larger than any block that the C library keeps for later, in which other values could stand.
    """
    scratch = x.new_empty(2**24, dtype=torch.float32)[:4]
    clean = torch.where(scratch.isnan(), scratch, 0.0)
    return (norm(x, weight, eps=eps).float() + clean.sum()).to(x.dtype)


def random_order(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Sums in another order each time, as atomics do."""
    order = torch.randperm(x.shape[-1])
    wide = x.float()[..., order]
    lanes = wide.square()
    total = torch.zeros_like(lanes[..., 0])
    for i in range(min(lanes.shape[-1], 64)):
        total = total + lanes[..., i::64].sum(-1)
    return (x.float() * torch.rsqrt(total[..., None] / x.shape[-1] + eps)).to(x.dtype) * weight


class CachedByAddress:
    def __init__(self) -> None:
        self.results: dict[object, Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        key = (x.data_ptr(), x.shape, x.dtype)
        if key not in self.results:
            self.results[key] = norm(x, weight, eps=eps)
        self.results["last"] = x  # keeps the memory from being handed out again
        return self.results[key].clone()


class CachedByFingerprint:
    """By address, shape, the first and the last row."""

    def __init__(self) -> None:
        self.results: dict[object, Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        ends = (x[0].tolist(), x[-1].tolist()) if x.numel() else ()
        key = (x.data_ptr(), x.shape, x.dtype, str(ends), float(weight.float().sum()))
        if key not in self.results:
            self.results[key] = norm(x, weight, eps=eps)
        return self.results[key].clone()


class StaleOutput:
    """Fills one buffer of its own and hands it out each time; the first call's result is gone with the second."""

    def __init__(self) -> None:
        self.kept: dict[object, Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        key = (x.shape, x.dtype)
        last = self.kept.get(key)
        self.kept[key] = norm(x, weight, eps=eps)
        return self.kept[key] if last is None else last


class Hoards:
    """Keeps every result."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y = norm(x, weight, eps=eps)
        self.kept.append(y.clone())
        return y


class LeavesThreads:
    def __init__(self) -> None:
        self.done = threading.Event()

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        threading.Thread(target=self.done.wait, daemon=True).start()
        return norm(x, weight, eps=eps)


def first_row_depends_on_the_batch(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Another order of summation where there is one row: right, but not batch-invariant as it claims."""
    if x.dim() != 2 or x.shape[0] > 1:
        return norm(x, weight, eps=eps)
    wide = x.float()
    mean = (wide.double().square().mean(-1, keepdim=True) * (1 + 2e-7)).float()
    return (weight * (wide * torch.rsqrt(mean + eps)).to(x.dtype)).to(x.dtype)


Planted = tuple[Callable[[], Callable[..., Any]], str, str, dict[str, Any]]


def plain(kernel: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: kernel


PLANTED: dict[str, Planted] = {
    "no eps": (plain(no_eps), "values", "*/small", {}),
    "half-precision accumulation": (plain(half_accumulation), "values", "*", {"dtype": "bfloat16"}),
    "scale inverted": (plain(scale_inverted), "values", "*", {}),
    "zero output below the tolerance": (plain(zeros_for_small), "values", "*", {"code": "all-zero"}),
    "wrong at one width": (plain(wrong_at_one_width), "values", "*", {}),
    "damaged input": (plain(damages_input), "values", "*", {"code": "mutated"}),
    "undeclared alias": (plain(returns_its_input), "values", "*", {"code": "alias"}),
    "wrong dtype": (plain(wrong_dtype), "values", "*", {"code": "structure"}),
    "last row not written": (plain(skips_last_row), "values", "*", {"form": "out", "code": "non-finite"}),
    "guard band overwritten": (plain(writes_behind_its_output), "values", "*", {"form": "out", "code": "guard"}),
    "strides ignored": (plain(reads_as_if_contiguous), "apart", "*", {}),
    "alignment assumed": (plain(begins_at_an_aligned_address), "offset", "*", {}),
    "32-bit offsets": (plain(offsets_of_32_bits), "far", "*", {"dtype": "bfloat16"}),
    "uninitialised scratch": (plain(unfilled_scratch), "uninitialised", "*", {}),
    "not deterministic": (plain(random_order), "repeat", "*/long", {"code": "nondeterministic"}),
    "cached by address": (CachedByAddress, "fresh", "*", {"code": "cached-by-address"}),
    "cached by fingerprint": (CachedByFingerprint, "fresh", "*", {"code": "cached-by-fingerprint"}),
    "stale output": (StaleOutput, "fresh", "*", {"code": "cached-by-address"}),
    "memory grows": (Hoards, "allocation", "*", {"code": "memory-growth"}),
    "thread left behind": (LeavesThreads, "threads", "*", {"code": "thread"}),
    "batch-variant": (plain(first_row_depends_on_the_batch), "batch-invariant", "*/odd", {"invariant": True}),
}


def tried(
    site: Site,
    kernel: object,
    op: str,
    cases: str = "*",
    *,
    dtype: str = "float32",
    invariant: bool = False,
    form: str = "functional",
    every: int = 1,
) -> Caught | None:
    claims = [{"dtype": [dtype]}, *([{"feature": ["batch_invariant"]}] if invariant else [])]
    return first_failure(subject(site, kernel, "op", op, requires=claims, form=form), OpTrials(), cases, every=every)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if title == "memory grows":  # where steps are recorded, recording notices first
        monkeypatch.setattr(type(site.platform), "graph_engine", Platform.graph_engine)
    make, check, cases, options = PLANTED[title]
    code = options.get("code")
    caught = tried(site, make(), "rms_norm", cases, **{k: v for k, v in options.items() if k != "code"})
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)
    assert code is None or code in caught.codes, str(caught)


@FEWER
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("kernel", "form"), [(healthy, "functional"), (healthy_out, "out")])
def test_a_healthy_kernel_passes(site: Site, kernel: object, form: str, dtype: str, every: int) -> None:
    assert tried(site, kernel, "rms_norm", form=form, dtype=dtype, every=every) is None


def test_a_declared_mutation_is_no_fault_and_another_is(site: Site) -> None:
    def negates_values(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        store_kv.reference(k, v, k_cache, v_cache, slots)
        slots.neg_()

    assert tried(site, store_kv.reference, "store_kv") is None
    caught = tried(site, negates_values, "store_kv")
    assert caught
    assert (caught.check, caught.codes) == ("values", {"mutated"})


def test_a_declared_alias_is_no_fault(site: Site) -> None:
    def into_the_residual(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        residual += x
        return norm(residual, weight, eps=eps), residual

    caught = tried(site, into_the_residual, "add_rms_norm")
    assert caught is None, str(caught)


def test_a_fake_that_lies_is_caught(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape, dtype=torch.float64), residual.new_empty(residual.shape)

    monkeypatch.setattr(add_rms_norm, "allocate", allocate)
    caught = tried(site, add_rms_norm.reference, "add_rms_norm")
    assert caught
    assert (caught.check, caught.codes) == ("fake", {"fake"})


def test_an_exact_op_may_not_be_nearly_right(site: Site) -> None:
    def off_by_one(*args: Any, **kwargs: Any) -> Tensor:
        slots = slot_mapping.reference(*args, **kwargs).clone()
        slots[-1:] += 1
        return slots

    caught = tried(site, off_by_one, "slot_mapping")
    assert caught
    assert (caught.check, caught.codes) == ("values", {"exact"})


def test_what_a_kernel_raises_is_its_fault(site: Site) -> None:
    def raises(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        raise ArithmeticError("no such luck")

    caught = tried(site, raises, "rms_norm")
    assert caught
    assert (caught.check, caught.codes) == ("values", {"exception"})
    assert "in raises" in str(caught)
    assert "no such luck" in str(caught)


def test_deterministic_false_is_recorded_not_skipped(site: Site) -> None:
    kernel = partial(random_order)
    kernel.deterministic = False  # type: ignore[attr-defined]  # how a target declares it
    assert tried(site, kernel, "rms_norm", "*/long") is None


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("rms_norm", True),
        ("traced_norm", True),
        ("lying_norm", False),
        ("baking_norm", False),
        ("last_column_norm", False),
    ],
)
def test_replays_of_third_parties_kernels_are_tried_as_engines_run_them(site: Site, name: str, right: bool) -> None:
    """A kernel that writes through addresses is called again by each run, unless it says that a recorder sees it."""
    if not site.records_graphs:
        pytest.skip("no compiled kernels were built, and no steps are recorded without")
    kernel = subject(site, getattr(raw_kernels, name), "op", "rms_norm", requires=[{"dtype": ["float32"]}])
    kernel = replace(kernel, offer=replace(kernel.offer, plugin="acme"))
    caught = first_failure(kernel, OpTrials(), "*/odd")
    assert caught is None if right else caught and caught.check == "replay"


# Faults that outside authors planted.


def axis_by_size(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Sums along the first axis that is as long as the weight."""
    axis = list(x.shape).index(weight.shape[0])
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(axis, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def test_as_many_rows_as_columns_are_tried(site: Site) -> None:
    caught = tried(site, axis_by_size, "rms_norm")
    assert caught
    assert caught.check == "rows"


def _gated(x: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return change(gate, up).to(x.dtype)


@pytest.mark.parametrize(
    ("change", "case"),
    [
        (lambda gate, up: torch.where(gate < -10, 0, functional.silu(gate)) * up, "silu_wide"),
        (lambda gate, up: functional.silu(gate.nan_to_num(0.0)) * up, "silu_gate_nan"),
        (lambda gate, up: functional.silu(gate) * up.clamp(-5e4, 5e4), "silu_huge"),
    ],
    ids=["small gates cut", "NaN of the gate lost", "factor clamped"],
)
def test_gates_of_all_magnitudes_are_tried(site: Site, change: Callable[..., Tensor], case: str) -> None:
    def kernel(x: Tensor, *, activation: str) -> Tensor:
        return _gated(x, change)

    claims = [{"dtype": ["float32"]}, {"activation": ["silu"]}]
    caught = first_failure(subject(site, kernel, "op", "act_and_mul", requires=claims), OpTrials())
    assert caught
    assert (caught.case, caught.check) == (f"float32/{case}", "values")


# Kernels that write a cache whose elements have scales.


def composed(spoil: Callable[[dict[str, Tensor]], object]) -> Callable[..., Any]:
    """The op out of its parts, whose cache is spoilt behind it."""

    def factory(ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        whole = compose(ctx, workload, parts)

        def kernel(q: Tensor, k: Tensor, v: Tensor, table: Any, positions: Tensor, cache: Any, *rest: Any, **kw: Any):  # type: ignore[no-untyped-def]
            found = whole(q, k, v, table, positions, cache, *rest, **kw)
            spoil(cache)
            return found

        return kernel

    return factory


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda cache: None, None),
        (lambda cache: cache["k_scale"].copy_(cache["k_scale"].roll(1, -1)), "peak"),
        (lambda cache: cache["v_scale"].mul_(1.5), "gain"),
        (lambda cache: cache["v"][1:].zero_(), "all-zero"),
    ],
    ids=["healthy", "another head's scale", "scales too large", "no values"],
)
def test_caches_of_8_bit_elements_are_compared(site: Site, spoil: Callable[..., Any], code: str | None) -> None:
    requires = [{"layout": ["plain_scaled"]}]
    kernel = subject(site, composed(spoil), "op", "qk_norm_rope_store", name="composed", requires=requires)
    cases = {trial.case for trial in OpTrials().trials(kernel, Plan()) if not trial.unsupported}
    assert {case.rpartition("/kv-")[2] for case in cases} >= {"int8", "float8_e4m3fn", "float8_e5m2"}
    caught = first_failure(kernel, OpTrials(), "float32/*", Plan())
    assert (caught.codes >= {code} and caught.check == "values") if caught else code is None


def test_a_kernel_that_requires_a_scalar_is_tried_with_it_alone(site: Site) -> None:
    """A rope kernel that knows one way of pairing elements: right where it declines the other, caught where not."""

    def halves(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> Any:
        return rotary_embedding.reference(q, k, positions, cos_sin)

    declines = [{"scalar": {"interleaved": False}}]
    plan = Plan()
    tried = subject(site, halves, "op", "rotary_embedding", requires=declines)
    cases = {trial.case: trial.unsupported for trial in OpTrials().trials(tried, plan)}
    refused = {case for case, reason in cases.items() if reason is not None}
    assert refused == {case for case in cases if "interleaved" in case}
    assert first_failure(tried, OpTrials(), "float32/*", plan) is None
    caught = first_failure(subject(site, halves, "op", "rotary_embedding"), OpTrials(), "float32/*", plan)
    assert caught is not None
    assert "interleaved" in caught.case
