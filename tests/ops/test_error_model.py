"""The judge's rule, bound by bound, on ops made for the purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from hardpoint.ops.base import Case, CustomOp, custom_op
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint.ops.judge import Verdict, judge

Tensor = torch.Tensor


def no_cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    yield from ()


@custom_op(cases=no_cases, errors=ErrorModel())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@custom_op(cases=no_cases, errors=ErrorModel(scale="element"))
def doubled_by_element(x: Tensor) -> Tensor:
    return x * 2


@custom_op(cases=no_cases, errors=ErrorModel(exact=True, ignore_null_page=("cache",)), mutates=["cache"])
def filled(cache: dict[str, Tensor], x: Tensor) -> None:
    cache["k"][1] = x


def run(
    op: CustomOp[..., Any], implementation: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float32
) -> Verdict:
    return judge(op, implementation, Case("case", args), dtype=dtype)


def codes(verdict: Verdict) -> set[str]:
    return {fault.code for fault in verdict.faults}


def test_a_passing_verdict_says_how_much_was_used() -> None:
    verdict = run(doubled, lambda x: x + x, torch.randn(4, 8))
    assert verdict.passed
    assert verdict.used == {"peak": 0, "mean": 0, "gain": 0, "direction": 0, "outliers": 0}
    assert str(verdict) == "doubled, case case, float32: passed"


def test_a_failing_verdict_shows_the_first_mismatch() -> None:
    def wrong(x: Tensor) -> Tensor:
        y = x * 2
        y[2, 1:] += 1.0
        return y

    verdict = run(doubled, wrong, torch.ones(4, 3))
    assert "output 0: at [2, 1] expected 2, got 3; 4.19e+06 units, 4 allowed; 1 of 4 rows [peak]" in str(verdict)


@pytest.mark.parametrize("bound", ["peak", "mean", "gain", "direction", "outliers"])
def test_each_bound_sees_what_the_others_do_not(bound: str) -> None:
    """An error for each bound, below every other one: units are of float32 at 2.0, on 200 rows of 1000."""
    unit, x = torch.finfo(torch.float32).eps * 2, torch.ones(200, 1000)
    sign = torch.where(torch.arange(1000) % 2 == 0, 1.0, -1.0)
    error = torch.zeros(200, 1000)
    match bound:
        case "peak":
            error[3, 7] = 6 * unit
        case "mean" | "direction":
            error[3] = 2 * unit * sign
        case "gain":
            error[3] = 2 * unit
        case _:
            error[:, :20] = 2 * unit * sign[:20]
    verdict = run(doubled, lambda x: x * 2 + error, x)
    expected = {"mean": {"mean", "direction"}, "direction": {"mean", "direction"}, "gain": {"mean", "gain"}}
    assert codes(verdict) == expected.get(bound, {bound})


def test_the_references_own_error_widens_the_bounds() -> None:
    @custom_op(cases=no_cases, errors=ErrorModel())
    def cancelling(x: Tensor) -> Tensor:
        return (x + 1000.0) - 1000.0

    x = torch.linspace(0.5, 1, 256)[None]
    assert run(cancelling, lambda x: x.clone(), x).passed
    assert run(cancelling, lambda x: (x + 2000.0) - 2000.0, x).passed
    assert not run(cancelling, lambda x: (x + 100_000.0) - 100_000.0, x).passed
    assert not run(doubled, lambda x: ((x + 1000.0) - 1000.0) * 2, x).passed


def test_element_scale_holds_small_elements_to_their_own_magnitude() -> None:
    x = torch.tensor([[100.0, 0.01, 1.0]], dtype=torch.bfloat16)

    def small_one_wrong(x: Tensor) -> Tensor:
        y = x * 2
        y[0, 1] *= 1.2
        return y

    assert run(doubled, small_one_wrong, x, dtype=torch.bfloat16).passed
    assert codes(run(doubled_by_element, small_one_wrong, x, dtype=torch.bfloat16)) >= {"peak"}


@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e4])
def test_all_zero_fails_at_any_magnitude(magnitude: float) -> None:
    verdict = run(doubled, torch.zeros_like, torch.full((2, 2), magnitude))
    assert codes(verdict) == {"all-zero"}
    assert run(doubled, torch.zeros_like, torch.zeros(2, 2)).passed


@pytest.mark.parametrize(
    ("inputs", "outputs", "good"),
    [
        ([1.0, float("nan")], [2.0, float("nan")], True),
        ([1.0, float("nan")], [2.0, 0.0], False),
        ([1.0, 1.0], [2.0, float("nan")], False),
        ([1.0, float("inf")], [2.0, float("inf")], True),
        ([1.0, float("inf")], [2.0, float("-inf")], False),
        ([1.0, float("inf")], [2.0, 3e38], False),
        ([1.0, float("-inf")], [2.0, float("nan")], False),
        ([1.0, 3e38], [2.0, float("inf")], True),
    ],
)
def test_nan_and_infinities_stand_where_they_belong(inputs: list[float], outputs: list[float], good: bool) -> None:
    verdict = run(doubled, lambda x: torch.tensor([outputs]), torch.tensor([inputs]))
    assert codes(verdict) == (set() if good else {"non-finite"})


def test_finite_where_the_reference_overflows_on_the_way_is_no_fault() -> None:
    @custom_op(cases=no_cases, errors=ErrorModel())
    def halved(x: Tensor) -> Tensor:
        return (x * 4) / 8

    x = torch.tensor([[60000.0, 1.0]], dtype=torch.float16)
    assert run(halved, lambda x: x / 2, x, dtype=torch.float16).passed
    assert run(halved, lambda x: (x * 4) / 8, x, dtype=torch.float16).passed
    assert not run(halved, lambda x: x / 3, x, dtype=torch.float16).passed


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "expected 1 outputs, got 0"),
        (torch.zeros(3, 3), r"expected shape \[2, 2\], got \[3, 3\]"),
        (torch.zeros(2, 2, dtype=torch.float16), "expected dtype torch.float32, got torch.float16"),
        ([0.0], "expected a tensor, got list"),
    ],
)
def test_outputs_have_the_references_structure(result: Any, message: str) -> None:
    verdict = run(doubled, lambda x: result, torch.ones(2, 2))
    assert codes(verdict) == {"structure"}
    with pytest.raises(AssertionError, match=message):
        assert verdict.passed, str(verdict)


def test_an_input_that_changes_is_found() -> None:
    verdict = run(doubled, lambda x: x.add_(1) * 2 - 2, torch.ones(2, 2))
    assert [str(f) for f in verdict.faults] == ["x: at [0, 0] expected 1, got 2; not declared [mutated]"]


def test_memory_around_an_input_is_watched() -> None:
    def writes_beside(x: Tensor) -> Tensor:
        y = x * 2
        torch.as_strided(x, (1,), (1,), 5).fill_(7.0)
        return y

    buffer = torch.randn(4, 8)
    verdict = run(doubled, writes_beside, buffer[:, :4])
    assert [str(f) for f in verdict.faults] == ["x: the memory around it was written [guard]"]


@pytest.mark.parametrize("place", range(3, 7))
def test_every_byte_around_an_input_is_watched(place: int) -> None:
    """Memory is compared in words of 8 bytes; 28 bytes end with half of one."""

    def writes_beside(x: Tensor) -> Tensor:
        y = x * 2
        torch.as_strided(x, (1,), (1,), place).fill_(7.0)
        return y

    buffer = torch.zeros(7)
    assert buffer.untyped_storage().nbytes() == 28
    assert codes(run(doubled, writes_beside, buffer[:3])) == {"guard"}


def test_undeclared_aliases_are_found_and_disjoint_views_are_none() -> None:
    assert codes(run(doubled, lambda x: x.mul_(2), torch.ones(2, 2))) == {"alias", "mutated"}
    assert codes(run(doubled, lambda x: x, torch.zeros(2, 2))) == {"alias"}

    @custom_op(cases=no_cases, errors=ErrorModel(), aliases=[(0, "x")])
    def added(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    merged = torch.randn(4, 2, 3)
    assert run(added, lambda x, y: x.add_(y), merged[:, 0], merged[:, 1]).passed
    assert codes(run(added, lambda x, y: y.add_(x), merged[:, 0], merged[:, 1])) == {"alias", "mutated"}


def test_mutated_inputs_are_compared_but_for_the_null_page() -> None:
    cache, x = {"k": torch.randn(3, 4)}, torch.randn(4)

    def fills(page: int) -> Callable[..., None]:
        def fill(cache: dict[str, Tensor], x: Tensor) -> None:
            filled.reference(cache, x)
            cache["k"][page] += 1

        return fill

    assert run(filled, fills(0), cache, x).passed
    assert [f.where for f in run(filled, fills(2), cache, x).faults] == ["cache[k]"]
    verdict = run(filled, lambda cache, x: None, cache, x)
    assert [(f.code, f.where) for f in verdict.faults] == [("exact", "cache[k]")]


def test_the_case_stays_as_it_is() -> None:
    x = torch.ones(2, 2)
    run(doubled, lambda x: x.zero_(), x)
    assert torch.equal(x, torch.ones(2, 2))


def test_integers_are_exact_and_empty_outputs_pass() -> None:
    @custom_op(cases=no_cases, errors=ErrorModel())
    def counted(x: Tensor) -> Tensor:
        return (x > 0).sum(-1)

    x = torch.randn(5, 6)
    assert run(counted, lambda x: (x > 0).sum(-1), x).passed
    verdict = run(counted, lambda x: (x > 0).sum(-1) + 1, x)
    assert codes(verdict) == {"exact"}
    assert run(doubled, lambda x: x * 2, torch.empty(0, 4)).passed


def test_the_rule_can_be_printed() -> None:
    assert str(ErrorModel(exact=True)) == "equal to the reference, bit for bit"
    assert str(ErrorModel()) == (
        "at most 4 x the reference's own error, and 4 units in the last place of an element (1 on a row's average), "
        "at the row's magnitude"
    )


def test_right_results_of_few_columns_raise_no_alarm() -> None:
    """A row of a few elements has no mean to speak of: its floor is an element's. Nor have outputs of a few elements
    outliers: a reference may round all of them well by luck, as a perfect one does in the draw 1,614."""
    generator = torch.Generator().manual_seed(0)
    model, alarms = ErrorModel(), 0
    for number in range(2000):
        x = torch.rand(1 + number % 5, 24, generator=generator)
        weight = torch.rand(1 + number % 3, 24, generator=generator)
        truth, own = x.double() @ weight.double().T, x @ weight.T
        total = torch.zeros_like(own)
        for column in range(24):  # another order of summation
            total += x[:, column, None] * weight[None, :, column]
        for reference in (own, truth.float()):
            alarms += bool(compare("y", total, reference, truth, model, torch.device("cpu")).faults)
    assert alarms == 0


@pytest.mark.parametrize(
    ("wrong_rows", "right"),
    [
        (range(0, 1000, 10), True),  # each time that one of the ten rows comes
        ((0, *range(5, 1000, 10)), False),  # of two of them
        (range(500, 1000, 10), False),  # equal rows, unequal results
        (range(800, 1000, 10), True),  # within one of a hundred as they are
        (range(0, 400, 1), False),
    ],
)
def test_rows_that_repeat_others_are_no_more_outliers_than_one(wrong_rows: Iterable[int], right: bool) -> None:
    """Ten different rows of three, a hundred times: an element that is off by two units in one of them stands for one
    of 30 elements, not for 100 of 3,000."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(10, 3, generator=generator, dtype=torch.float64).add(1).float().double().repeat(100, 1)
    actual = truth.float()
    actual[list(wrong_rows), 1] += 2.5 * torch.finfo(torch.float32).eps * 2
    found = compare("y", actual, truth.float(), truth, ErrorModel(), torch.device("cpu"))
    assert (not found.faults) == right
    assert right or {fault.code for fault in found.faults} == {"outliers"}


def test_half_of_the_elements_are_no_outliers() -> None:
    """A reference that is off in less than one of a hundred elements does not show what error is usual."""
    generator = torch.Generator().manual_seed(0)
    truth, unit = torch.rand(200, 64, generator=generator).add(1).double(), torch.finfo(torch.float32).eps * 2
    own, actual = truth.float(), truth.float()
    own.view(-1)[:115] += unit
    actual.view(-1)[::2] += 2 * unit
    found = compare("y", actual, own, truth, ErrorModel(), torch.device("cpu"))
    assert "outliers" in {fault.code for fault in found.faults}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 3, 64, 20_000])
def test_one_rounding_is_within_the_bound_on_accumulation(dtype: torch.dtype, count: int) -> None:
    for seed in range(100):
        truth = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = compare("y", truth.to(dtype), truth.to(dtype), truth, ErrorModel(), torch.device("cpu"))
        error, limit = found.measured["accumulation"]
        assert error <= 0.75 * limit
        assert not found.faults


def test_sixteen_roundings_are_beyond_the_bound_on_accumulation() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(32, 64, 96, generator=generator, dtype=torch.float64)
    truth, total = parts.sum(0), torch.zeros(64, 96, dtype=torch.bfloat16)
    for part in parts:
        total += part.bfloat16()
    found = compare("y", total, truth.bfloat16(), truth, ErrorModel(), torch.device("cpu"))
    assert {fault.code for fault in found.faults} == {"accumulation"}
