"""How far an implementation may stray from an op's reference, and ``judge``, which applies the rule.

The rule, and why it is this one:

1. *Truth* is the reference in float64, on the host: a yardstick that no device and no low precision bends.
2. The same reference in the case's own dtype shows what error is honest there. An implementation may err by
   ``multiple`` times as much, plus a floor for cases in which the reference happened to round well. So a tolerance is
   derived from each input, never picked by hand for a kernel: hard inputs widen it, easy ones narrow it.
3. Errors are counted in *units*: one unit in the last place of the output's dtype, at the magnitude of the row's
   largest element (``scale="row"``, for ops that mix elements and so may cancel) or of the element itself
   (``scale="element"``, where the last step is one rounding; what accumulates in float32 then adds a float32 unit at
   the row's magnitude). A row is the last axis.
4. Five bounds hold at once, since each sees what the others do not:
   peak (an element's error), mean (a row's root-mean-square), gain (the error along the true row: a wrong scale),
   direction (the error across it: what its cosine with the truth shows, but linear in the error, so that it can be
   compared), and outliers (how many elements exceed what the reference exceeds in ``outliers`` of its own).
5. Whatever the size of the errors, all zeros fail where the truth is not zero, and NaN and infinities stand where the
   reference or the rounded truth has them and nowhere else.
6. Integer outputs, and ops that only move or select data (``exact``), agree with the reference to the bit.
7. Inputs are left alone but for what is declared: an input changes only if the op mutates it, or if an output that
   may alias it does; the memory around strided inputs never changes.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from hardpoint.ops.base import Case, CustomOp

FaultCode = Literal[
    "structure", "non-finite", "all-zero", "exact", "peak", "mean", "gain", "direction", "outliers", "mutated", "alias"
]


@dataclass(frozen=True)
class ErrorModel:
    """An op's part of the rule; the defaults are the rule's own numbers.

    ``floor_peak`` and ``floor_row`` are in units: an element may be off by four however well the reference rounds, a
    row on the average by one. ``ignore_null_page`` names mutated caches whose page 0 nobody reads.
    """

    scale: Literal["row", "element"] = "row"
    exact: bool = False
    multiple: float = 4.0
    floor_peak: float = 4.0
    floor_row: float = 1.0
    outliers: float = 0.01
    ignore_null_page: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.exact:
            return "equal to the reference, bit for bit"
        return (
            f"{self.multiple:g} x the reference's own error + {self.floor_peak:g} units per element, "
            f"{self.floor_row:g} per row, at the {self.scale}'s magnitude"
        )


@dataclass(frozen=True)
class Fault:
    """One broken bound. ``where`` is an output ("output 0") or an input's name."""

    code: FaultCode
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.code}]"


@dataclass(frozen=True)
class Verdict:
    """The outcome for one case. ``used`` is the largest share of each numeric bound that was used up (1: all)."""

    op: str
    case: str
    dtype: torch.dtype
    faults: tuple[Fault, ...]
    used: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True where nothing is wrong."""
        return not self.faults

    def __str__(self) -> str:
        head = f"{self.op}, case {self.case}, {str(self.dtype).removeprefix('torch.')}"
        return f"{head}: passed" if self.passed else "\n  ".join([f"{head}: failed", *map(str, self.faults)])


@torch.inference_mode()
def judge(op: CustomOp[..., Any], implementation: Callable[..., Any], case: Case, *, dtype: torch.dtype) -> Verdict:
    """Run ``implementation`` on a copy of ``case`` and hold it to the op's error model.

    ``implementation`` has the reference's signature; ``dtype`` is what the case was drawn for. The case itself stays
    as it is. What the implementation raises is not caught.
    """
    mine, before = copy.deepcopy(case), copy.deepcopy(case)
    outputs = _sequence(implementation(*mine.args, **mine.kwargs))
    own_case = _map(case, torch.Tensor.cpu)
    own = _sequence(op.reference(*own_case.args, **own_case.kwargs))
    true_case, truth = own_case, own
    if not op.errors.exact:
        true_case = _map(case, _widened)
        truth = _sequence(op.reference(*true_case.args, **true_case.kwargs))

    if len(outputs) != len(own):
        message = f"expected {len(own)} outputs, got {len(outputs)}"
        return Verdict(op.name, case.name, dtype, (Fault("structure", "outputs", message),))
    compared = [(f"output {i}", *tensors) for i, tensors in enumerate(zip(outputs, own, truth, strict=True))]
    for got, expected, true in zip(*(_inputs(op, c) for c in (mine, own_case, true_case)), strict=True):
        if got.parameter in op.mutates:
            skip = 1 if got.parameter in op.errors.ignore_null_page else 0
            compared.append((got.label, got.tensor[skip:], expected.tensor[skip:], true.tensor[skip:]))

    device = next((i.tensor.device for i in _inputs(op, mine)), torch.device("cpu"))
    faults, used = [], dict[str, float]()
    for where, actual, expected, true in compared:
        comparison = _compare(where, actual, expected, true, op.errors, device)
        faults += comparison.faults
        used = {key: max(used.get(key, 0.0), share) for key, share in (used | comparison.used).items()}
    faults += _side_effects(op, _inputs(op, mine), _inputs(op, before), outputs)
    return Verdict(op.name, case.name, dtype, tuple(faults), used)


# Values.


@dataclass
class _Comparison:
    """What was found in one tensor."""

    faults: list[Fault] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)


def _compare(
    where: str, actual: object, own: torch.Tensor, truth: torch.Tensor, model: ErrorModel, device: torch.device
) -> _Comparison:
    """Compare one tensor with the reference's (``own``) and the truth, both on the host."""
    if not isinstance(actual, torch.Tensor):
        return _Comparison([Fault("structure", where, f"expected a tensor, got {type(actual).__name__}")])
    for what, expected, got in (
        ("shape", list(own.shape), list(actual.shape)),
        ("dtype", own.dtype, actual.dtype),
        ("device", device, actual.device),
    ):
        if expected != got:
            return _Comparison([Fault("structure", where, f"expected {what} {expected}, got {got}")])
    actual = actual.cpu()
    if not actual.numel():
        return _Comparison()
    if model.exact or not actual.dtype.is_floating_point:
        wrong = (actual != own) & ~((actual != actual) & (own != own))
        return _Comparison([Fault("exact", where, _mismatch(wrong, own, actual))] if wrong.any() else [])
    return _Numbers(where, actual, own, truth, model).judge()


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

    def judge(self) -> _Comparison:
        misplaced = (_kind(self.actual) != _kind(self.own)) & (_kind(self.actual) != _kind(self.rounded))
        if misplaced.any():
            return _Comparison([Fault("non-finite", self.where, self._mismatch(misplaced))])
        if self.rounded.any() and not self.actual.any():
            return _Comparison([Fault("all-zero", self.where, self._mismatch(self.rounded != 0))])
        finite = self.actual.isfinite() & self.truth.isfinite()
        truth = torch.where(finite, self.truth, 0.0)
        units = self._units(truth)
        error = torch.where(finite, self.actual - truth, 0.0)
        own_error = torch.where(finite & self.own.isfinite(), self.own - truth, 0.0)
        found, honest = _row_errors(error, truth, units), _row_errors(own_error, truth, units)
        result = _Comparison()
        for bound, errors in found.items():
            floor = self.model.floor_peak if bound == "peak" else self.model.floor_row
            typical = honest[bound].square().mean().sqrt()
            allowed = self.model.multiple * torch.maximum(honest[bound], typical) + floor
            result.used[bound] = float((errors / allowed).max())
            if result.used[bound] > 1:
                row = int((errors > allowed).nonzero()[0])
                rows = torch.zeros_like(finite)
                elements = error[row].abs() / units[row]
                rows[row] = elements > allowed[row] if bound == "peak" else elements == elements.max()
                size = f"{float(errors[row]):.3g} units, {float(allowed[row]):.3g} allowed"
                many = f"{int((errors > allowed).sum())} of {len(errors)} rows"
                result.faults.append(Fault(bound, self.where, f"{self._mismatch(rows)}; {size}; {many}"))
        self._outliers(error.abs() / units, own_error.abs() / units, result)
        return result

    def _units(self, truth: torch.Tensor) -> torch.Tensor:
        """One unit in the last place per element (rule 3), never below the dtype's smallest number."""
        limits = torch.finfo(self.dtype)
        row = truth.abs().amax(-1, keepdim=True).expand_as(truth)
        smallest = limits.smallest_normal * limits.eps
        if self.model.scale == "row":
            return limits.eps * row + smallest
        accumulated = min(limits.eps, torch.finfo(torch.float32).eps)
        return limits.eps * truth.abs() + accumulated * row + smallest

    def _outliers(self, errors: torch.Tensor, honest: torch.Tensor, result: _Comparison) -> None:
        allowed_count = max(1, math.ceil(self.model.outliers * errors.numel()))
        typical = honest.flatten().kthvalue(errors.numel() - allowed_count + 1).values
        allowed = self.model.multiple * typical + self.model.floor_row
        count = int((errors > allowed).sum())
        result.used["outliers"] = count / allowed_count
        if count > allowed_count:
            size = f"{count} elements are over {float(allowed):.3g} units, {allowed_count} may be"
            result.faults.append(Fault("outliers", self.where, f"{self._mismatch(errors > allowed)}; {size}"))

    def _mismatch(self, wrong: torch.Tensor) -> str:
        shaped = (x.reshape(self.shape) for x in (wrong, self.truth, self.actual))
        return _mismatch(*shaped)


def _row_errors(error: torch.Tensor, truth: torch.Tensor, units: torch.Tensor) -> dict[FaultCode, torch.Tensor]:
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


def _mismatch(wrong: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor) -> str:
    """The first mismatch: its coordinates, what was expected and what came."""
    place = tuple(int(i) for i in wrong.nonzero()[0])
    return f"at {list(place)} expected {expected[place].item():.8g}, got {actual[place].item():.8g}"


# Side effects.


@dataclass(frozen=True)
class _Input:
    """One tensor among the inputs; ``label`` is the parameter's name, with the key where it is a mapping."""

    parameter: str
    label: str
    tensor: torch.Tensor


def _inputs(op: CustomOp[..., Any], case: Case) -> list[_Input]:
    arguments = inspect.signature(op.reference).bind(*case.args, **case.kwargs).arguments
    return [_Input(name, label, t) for name, value in arguments.items() for label, t in _tensors(name, value)]


def _tensors(label: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{label}[{key}]", item)


def _side_effects(
    op: CustomOp[..., Any], inputs: Sequence[_Input], before: Sequence[_Input], outputs: Sequence[object]
) -> list[Fault]:
    """Compare the inputs with their copies from before. Overwrites the copies."""
    faults, writable = [], set(op.mutates)
    for index, output in enumerate(outputs):
        for given in inputs:
            if isinstance(output, torch.Tensor) and _overlap(output, given.tensor):
                if (index, given.parameter) in op.aliases:
                    writable.add(given.parameter)
                else:
                    faults.append(Fault("alias", f"output {index}", f"shares memory with {given.label}, undeclared"))
    for given, old in zip(inputs, before, strict=True):
        if given.parameter in writable:
            old.tensor.copy_(given.tensor)
    suspects = [pair for pair in zip(inputs, before, strict=True) if not _same_storage(pair[0].tensor, pair[1].tensor)]
    changed = [(new, old, _bytes(new.tensor) != _bytes(old.tensor)) for new, old in suspects]
    for new, old, wrong in changed:
        if wrong.any():
            wrong = wrong.reshape(*new.tensor.shape, -1).any(-1)
            faults.append(Fault("mutated", new.label, f"{_mismatch(wrong, old.tensor, new.tensor)}; not declared"))
    if changed and not any(wrong.any() for _, _, wrong in changed):
        new = changed[0][0]
        faults.append(Fault("mutated", new.label, "memory around this strided input was written"))
    return faults


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(-1).view(torch.uint8)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte for byte, what lies outside the views included."""
    raw = (torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()) for x in (a, b))
    return torch.equal(*raw)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share an element's address; disjoint views of one buffer do not."""
    if a.device != b.device or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(x: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return offsets.flatten() * x.element_size()


# Cases.


def _sequence(result: object) -> Sequence[Any]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().double() if x.dtype.is_floating_point else x.cpu()


def _map(case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """A deep copy of ``case`` with ``change`` applied to each tensor."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return {k: changed(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    fresh = copy.deepcopy(case)
    return type(case)(case.name, tuple(map(changed, fresh.args)), changed(fresh.kwargs))
