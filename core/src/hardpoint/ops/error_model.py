"""How far a kernel may stray from its reference: the rule, and its application to one tensor.

The rule, and why it is this one:

1. *Truth* is the reference in float64, on the host: a yardstick that no device and no low precision bends.
2. The same reference in the case's own dtype shows what error is honest there. An implementation may err by
   ``multiple`` times as much, plus a floor for cases in which the reference happened to round well. So a tolerance is
   derived from each input, never picked by hand for a kernel: hard inputs widen it, easy ones narrow it.
3. Errors are counted in *units*: one unit in the last place of the output's dtype, at the magnitude of the row's
   largest element (``scale="row"``, for ops that mix elements and so may cancel) or of the element itself
   (``scale="element"``, where the last step is one rounding; what accumulates in float32 then adds a float32 unit at
   the row's magnitude). A row is the last axis.
4. Six bounds hold at once, since each sees what the others do not:
   peak (an element's error), mean (a row's root-mean-square), gain (the error along the true row: a wrong scale),
   direction (the error across it: what its cosine with the truth shows, but linear in the error, so that it can be
   compared), outliers (how many elements exceed what the reference exceeds in ``outliers`` of its own), and
   accumulation (the root mean square over the whole output: sums in 16 bits; see ``_Numbers._accumulation``).
   The floor of a row's bounds falls with the number of its elements, from an element's floor to ``floor_row``; that of
   outliers falls so with the number of elements of the output. Of rows that are equal in the truth, the reference and
   the output, one counts for outliers.
5. Two rules hold at every size of error: all zeros fail where the truth is not zero, and NaN and infinities stand
   exactly where the reference or the rounded truth has them.
6. Integer outputs, and ops that only move or select data (``exact``), agree with the reference to the bit.
7. Inputs are left alone but for what is declared: an input changes only if the op mutates it, or if an output that
   may alias it does; the memory around inputs never changes (``judge.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hardpoint.ops.comparison import Comparison, Fault

Bound = Literal["peak", "mean", "gain", "direction", "outliers", "accumulation"]

_DEVIATIONS = 3.0
"""How many standard deviations of a mean over random roundings a bound leaves to chance."""
_FLOAT32_UNITS = 16.0
"""The error that sums in float32 may add to an output of 16 bits, in units of float32: far below one of its own."""


@dataclass(frozen=True)
class ErrorModel:
    """An op's part of the rule; the defaults are the rule's own numbers.

    ``floor_peak`` and ``floor_row`` are in units: an element may be off by four however well the reference rounds, a
    long row on the average by one. A unit is never finer than ``finest`` of the magnitude, for what is built on
    functions that hardware only approximates. ``accumulated`` is how many times as large as one rounding of a sum in
    float32 (or as the reference's error) the root mean square error of a whole 16-bit output may be.
    ``ignore_null_page`` names mutated caches whose page 0 nobody reads.
    """

    scale: Literal["row", "element"] = "row"
    exact: bool = False
    multiple: float = 4.0
    floor_peak: float = 4.0
    floor_row: float = 1.0
    outliers: float = 0.01
    accumulated: float = 2.0
    finest: float = 0.0
    ignore_null_page: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.exact:
            return "equal to the reference, bit for bit"
        return (
            f"at most {self.multiple:g} x the reference's own error, and {self.floor_peak:g} units in the last place "
            f"of an element ({self.floor_row:g} on a row's average), at the {self.scale}'s magnitude"
        )


def compare(
    where: str, actual: object, own: torch.Tensor, truth: torch.Tensor, model: ErrorModel, device: torch.device
) -> Comparison:
    """Compare one tensor with the reference's (``own``) and the truth, both on the host."""
    if not isinstance(actual, torch.Tensor):
        return Comparison([Fault("structure", where, f"expected a tensor, got {type(actual).__name__}")])
    for what, expected, got in (
        ("shape", list(own.shape), list(actual.shape)),
        ("dtype", own.dtype, actual.dtype),
        ("device", device, actual.device),
    ):
        if expected != got:
            return Comparison([Fault("structure", where, f"expected {what} {expected}, got {got}")])
    actual = actual.cpu()
    if not actual.numel():
        return Comparison()
    if model.exact or not actual.dtype.is_floating_point:
        wrong = (actual != own) & ~((actual != actual) & (own != own))
        found = Comparison([Fault("exact", where, mismatch(wrong, own, actual))] if wrong.any() else [])
    else:
        found = _Numbers(where, actual, own, truth, model).judge()
    found.compared = actual.numel()
    return found


class _Numbers:
    """A floating-point output in rows: float64 [rows, n] each of the actual, the reference's own and the true values.

    Elements without a finite true value are set to zero everywhere, once their places have been compared.
    """

    def __init__(
        self, where: str, actual: torch.Tensor, own: torch.Tensor, truth: torch.Tensor, model: ErrorModel
    ) -> None:
        self.where, self.model, self.shape, self.dtype = where, model, actual.shape, actual.dtype
        columns = actual.shape[-1] if actual.dim() else 1
        self.actual, self.own = (x.double().reshape(-1, columns) for x in (actual, own))
        self.rounded = truth.to(own.dtype).double().reshape(-1, columns)
        self.truth = torch.where(self.rounded.isfinite(), truth.double().reshape(-1, columns), self.own)

    def judge(self) -> Comparison:
        finite = self.actual.isfinite() & self.own.isfinite()
        if not (all_finite := bool(finite.all())):
            misplaced = (_kind(self.actual) != _kind(self.own)) & (_kind(self.actual) != _kind(self.rounded))
            if misplaced.any():
                return Comparison([Fault("non-finite", self.where, self._mismatch(misplaced))])
        if self.rounded.any() and not self.actual.any():
            return Comparison([Fault("all-zero", self.where, self._mismatch(self.rounded != 0))])
        truth, error, own_error = self.truth, self.actual - self.truth, self.own - self.truth
        if not all_finite:
            finite = self.actual.isfinite() & truth.isfinite()
            truth = torch.where(finite, truth, 0.0)
            error = torch.where(finite, error, 0.0)
            own_error = torch.where(finite & self.own.isfinite(), own_error, 0.0)
        units = self._units(truth)
        found, honest = _row_errors(error, truth, units), _row_errors(own_error, truth, units)
        result = Comparison()
        for bound, errors in found.items():
            floor = self.model.floor_peak if bound == "peak" else self._floor(self.truth.shape[-1])
            typical = honest[bound].square().mean().sqrt()
            allowed = self.model.multiple * torch.maximum(honest[bound], typical) + floor
            nearest = int((errors / allowed).argmax())
            result.measured[bound] = (float(errors[nearest]), float(allowed[nearest]))
            if (errors > allowed).any():
                row = int((errors > allowed).nonzero()[0])
                rows = torch.zeros_like(finite)
                elements = error[row].abs() / units[row]
                rows[row] = elements > allowed[row] if bound == "peak" else elements == elements.max()
                size = f"{float(errors[row]):.3g} units, {float(allowed[row]):.3g} allowed"
                many = f"{int((errors > allowed).sum())} of {len(errors)} rows"
                result.faults.append(Fault(bound, self.where, f"{self._mismatch(rows)}; {size}; {many}"))
        self._outliers(error.abs() / units, own_error.abs() / units, result)
        self._accumulation(error / units, own_error / units, truth, units, result)
        return result

    def _floor(self, count: int) -> float:
        """The floor of what ``count`` elements tell together: one has an element's; the mean of n independent errors
        falls with the root of n."""
        few, many = self.model.floor_peak, self.model.floor_row
        return many + (few - many) / math.sqrt(count)

    def _units(self, truth: torch.Tensor) -> torch.Tensor:
        """One unit in the last place per element (rule 3), never below the dtype's smallest number."""
        limits = torch.finfo(self.dtype)
        row = truth.abs().amax(-1, keepdim=True).expand_as(truth)
        smallest = limits.smallest_normal * limits.eps
        eps = max(limits.eps, self.model.finest)
        if self.model.scale == "row":
            return eps * row + smallest
        accumulated = min(limits.eps, torch.finfo(torch.float32).eps)
        return eps * truth.abs() + accumulated * row + smallest

    def _outliers(self, errors: torch.Tensor, honest: torch.Tensor, result: Comparison) -> None:
        count, allowed_count, allowed = self._over(errors, honest)
        if count > allowed_count and len(once := self._different_rows()) < len(errors):
            count, allowed_count, allowed = self._over(errors[once], honest[once])
        result.measured["outliers"] = (count, allowed_count)
        if count > allowed_count:
            size = f"{count} elements are over {allowed:.3g} units, {allowed_count} may be"
            result.faults.append(Fault("outliers", self.where, f"{self._mismatch(errors > allowed)}; {size}"))

    def _over(self, errors: torch.Tensor, honest: torch.Tensor) -> tuple[int, int, float]:
        """How many elements are over the bound, how many may be, and the bound in units."""
        allowed_count = max(1, math.ceil(self.model.outliers * errors.numel()))
        typical = honest.flatten().kthvalue(errors.numel() - allowed_count + 1).values
        # The reference may round every one of a few elements well by luck.
        allowed = self.model.multiple * float(typical) + self._floor(errors.numel())
        return int((errors > allowed).sum()), allowed_count, allowed

    def _different_rows(self) -> torch.Tensor:
        """The first of each set of rows that are equal in the truth and the reference; all rows where the output is not
        equal in all of a set."""
        generator = torch.Generator().manual_seed(0)
        sums = torch.zeros(len(self.truth), dtype=torch.float64)
        firsts = []
        for numbers in (self.truth, self.own, self.actual):  # a sum stands for a row: others have it by chance alone
            weights = torch.rand(numbers.shape[-1], generator=generator, dtype=torch.float64)
            sums = sums + (numbers.nan_to_num(0.0, 0.0, 0.0) * weights).sum(-1)
            firsts.append(np.unique(sums.numpy(), return_index=True)[1])
        _, expected, found = firsts
        return torch.from_numpy(found) if len(expected) == len(found) else torch.arange(len(sums))

    def _accumulation(
        self, errors: torch.Tensor, honest: torch.Tensor, truth: torch.Tensor, units: torch.Tensor, result: Comparison
    ) -> None:
        """Bound the root mean square error of the whole output, where its dtype has 16 bits.

        A kernel that sums in float32 and rounds once is off by a rounding of the truth alone: a root mean square of
        2^e * eps / sqrt(12) for an element between 2^e and 2^(e+1), whatever the length of the sum. The bound is
        ``accumulated`` times that, or times the reference's own error where it rounds more often (weights that were
        dequantized, a middle between two products). A kernel that rounds n partial sums to 16 bits is off by some
        sqrt(n / 2) roundings.
        """
        limits = torch.finfo(self.dtype)
        counts = truth != 0
        if limits.bits != 16 or not counts.any():
            return
        exponent = torch.frexp(truth[counts]).exponent - 1
        rounding = torch.ldexp(torch.full_like(truth[counts], limits.eps), exponent) / math.sqrt(12)
        rounding = rounding.clamp(min=limits.smallest_normal * limits.eps / math.sqrt(12)) / units[counts]

        def root_mean_square(x: torch.Tensor) -> float:
            return float(x.square().mean().sqrt())

        found = root_mean_square(errors[counts])
        by_chance = 1 + _DEVIATIONS / math.sqrt(int(counts.sum()))
        typical = max(root_mean_square(rounding), root_mean_square(honest[counts]))
        float32 = max(_FLOAT32_UNITS * torch.finfo(torch.float32).eps, self.model.finest) / limits.eps
        allowed = self.model.accumulated * by_chance * typical + float32
        result.measured["accumulation"] = (found, allowed)
        if found > allowed:
            size = f"the whole output is off by {found:.3g} units (root mean square), {allowed:.3g} allowed"
            why = "are sums kept in 16 bits?"
            result.faults.append(Fault("accumulation", self.where, f"{size}: {why}"))

    def _mismatch(self, wrong: torch.Tensor) -> str:
        shaped = (x.reshape(self.shape) for x in (wrong, self.truth, self.actual))
        return mismatch(*shaped)


def _row_errors(error: torch.Tensor, truth: torch.Tensor, units: torch.Tensor) -> dict[Bound, torch.Tensor]:
    """Each bound's measure of [rows, n] errors, in units, [rows]."""
    axis = torch.nn.functional.normalize(truth, dim=-1, eps=0.0).nan_to_num()
    along = (error * axis).sum(-1)
    across = (error - along[:, None] * axis).norm(dim=-1)
    unit = units.norm(dim=-1)
    in_units = (error / units).abs()
    return {
        "peak": in_units.amax(-1),
        "mean": in_units.square().mean(-1).sqrt(),
        "gain": along.abs() / unit,
        "direction": across / unit,
    }


def _kind(x: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 and 3 the infinities."""
    return x.isnan() + 2 * x.isposinf() + 3 * x.isneginf()


def mismatch(wrong: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor) -> str:
    """The first mismatch: its coordinates, what was expected and what came."""
    place = tuple(int(i) for i in wrong.nonzero()[0])
    return f"at {list(place)} expected {expected[place].item():.8g}, got {actual[place].item():.8g}"
