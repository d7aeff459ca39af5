"""``judge``: run one call of a kernel, and hold its results, and what it did to its inputs, to an error model.

A ``Call`` is neutral: ops, attention backends, stores and layers are all judged by ``judge_call``. ``judge`` makes the
call of an op's case. The rule itself is in ``error_model.py``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.dtypes import dtype_of
from hardpoint.ops.comparison import Comparison, Fault
from hardpoint.ops.error_model import ErrorModel, compare, mismatch
from hardpoint_plugin_api import QuantSpec

if TYPE_CHECKING:
    from hardpoint.ops.base import Case, CustomOp

_SPEC = "spec"
"""The keyword of ops that round their result."""


@dataclass(frozen=True)
class Input:
    """One tensor among a kernel's inputs; ``label`` is the parameter's name, with the key where it is a mapping."""

    parameter: str
    label: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Expectation:
    """One expected result, on the host: the reference's in the kernel's own dtype, and the truth in float64.

    ``or_else`` is another answer that is as right: the error model is applied to each, and the better counts.
    """

    label: str
    own: torch.Tensor
    truth: torch.Tensor
    or_else: Expectation | None = None


@dataclass(frozen=True)
class Expected:
    """The expected outputs of a call, and the expected state that it changes."""

    outputs: tuple[Expectation, ...]
    state: tuple[Expectation, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of a kernel, on inputs that lie in memory and may be filled anew before it runs again.

    ``plan`` is the host's part, which is never recorded; it returns a token, and a recording made after another token
    must not be replayed. ``run`` calls the kernel on what ``inputs`` hold and returns its outputs; ``state`` reads
    those of the changed inputs that are compared. ``expect`` computes what both should be, from values of its own:
    nothing that the kernel could have damaged, or could have read the answer from. ``idle`` returns what a kernel that
    does nothing would; ``before`` precedes each run, and may spoil memory that the kernel must not read. ``read`` turns
    outputs into what is compared, and raises ValueError where they are not what can be read.
    ``mutates`` and ``aliases`` are an op's: names of parameters, and (output index, parameter).
    """

    inputs: tuple[Input, ...]
    run: Callable[[], object]
    expect: Callable[[], Expected]
    errors: ErrorModel
    state: Callable[[], Sequence[torch.Tensor]] = tuple
    read: Callable[[Sequence[Any]], Sequence[Any]] = tuple
    idle: Callable[[], object] = tuple
    before: Callable[[], None] = lambda: None
    plan: Callable[[], object] = lambda: None
    mutates: frozenset[str] = frozenset()
    aliases: frozenset[tuple[int, str]] = frozenset()

    @property
    def device(self) -> torch.device:
        """The device on which outputs must be."""
        return next((i.tensor.device for i in self.inputs), torch.device("cpu"))


@dataclass(frozen=True)
class Verdict:
    """The outcome for one case. ``measured`` holds for each bound the error and its limit where it came nearest."""

    op: str
    case: str
    dtype: torch.dtype
    faults: tuple[Fault, ...]
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True where nothing is wrong."""
        return not self.faults

    @property
    def used(self) -> dict[str, float]:
        """The largest share of each numeric bound that was used up (1: all)."""
        return {bound: error / limit for bound, (error, limit) in self.measured.items()}

    def __str__(self) -> str:
        head = f"{self.op}, case {self.case}, {str(self.dtype).removeprefix('torch.')}"
        return f"{head}: passed" if self.passed else "\n  ".join([f"{head}: failed", *map(str, self.faults)])


def judge(
    op: CustomOp[..., Any],
    implementation: Callable[..., Any],
    case: Case,
    *,
    dtype: torch.dtype,
    expected: Expected | None = None,
) -> Verdict:
    """Run ``implementation`` on a copy of ``case`` and hold it to the op's error model.

    ``implementation`` has the reference's signature; ``dtype`` is what the case was drawn for. The case itself stays as
    it is. ``expected``, where several implementations are judged by one case, is its ``op_expected``. Errors of the
    implementation are not caught.
    """
    mine = _map(case, lambda x: x)
    call = Call(
        inputs=tuple(op_inputs(op, mine)),
        run=lambda: implementation(*mine.args, **mine.kwargs),
        state=lambda: op_state(op, op_inputs(op, mine)),
        expect=lambda: expected or op_expected(op, case),
        errors=op.errors,
        read=op_read(op, mine),
        mutates=frozenset(op.mutates),
        aliases=frozenset(op.aliases),
    )
    found = judge_call(call)
    return Verdict(op.name, case.name, dtype, tuple(found.faults), found.measured)


@torch.inference_mode()
def judge_call(call: Call, run: Callable[[], object] | None = None, *, whole_storages: bool = True) -> Comparison:
    """Run ``call`` (or ``run`` in its place) once and return every fault, with the worst error per bound.

    ``whole_storages`` False copies and compares the inputs themselves, not all the memory that they are views of.
    """
    call.before()
    before = _copies(call.inputs, whole_storages)
    call.plan()
    outputs = sequence((run or call.run)())
    expected = call.expect()
    try:
        read = call.read(outputs)
    except ValueError as error:
        return Comparison([Fault("structure", "outputs", str(error))])
    if len(read) != len(expected.outputs):
        message = f"expected {len(expected.outputs)} outputs, got {len(read)}"
        return Comparison([Fault("structure", "outputs", message)])
    result = Comparison()
    for actual, wanted in zip((*read, *call.state()), (*expected.outputs, *expected.state), strict=True):
        result.add(_best(actual, wanted, call))
    result.faults += _side_effects(call, before, outputs)
    return result


def _best(actual: object, wanted: Expectation, call: Call) -> Comparison:
    first = compare(wanted.label, actual, wanted.own, wanted.truth, call.errors, call.device)
    if not first.faults or wanted.or_else is None:
        return first
    other = _best(actual, wanted.or_else, call)
    return first if other.faults else other


# An op's case.


def op_inputs(op: CustomOp[..., Any], case: Case) -> list[Input]:
    """The tensors among a case's arguments."""
    arguments = _signature(op.reference).bind(*case.args, **case.kwargs).arguments
    return [Input(name, label, t) for name, value in arguments.items() for label, t in _tensors(name, value)]


@lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def op_state(op: CustomOp[..., Any], inputs: Sequence[Input]) -> list[torch.Tensor]:
    """The ``inputs`` that the op mutates, without the null pages, which nobody reads."""
    skip = op.errors.ignore_null_page
    return [i.tensor[1:] if i.parameter in skip else i.tensor for i in inputs if i.parameter in op.mutates]


def op_expected(op: CustomOp[..., Any], case: Case) -> Expected:
    """The expected results of ``case``: by the reference on the host, in the case's own dtype and in float64."""
    outputs, own_state = _reference(op, op.reference, _map(case, torch.Tensor.cpu))
    own, true, true_state = op_read(op, case)(outputs), outputs, own_state
    if not op.errors.exact:
        wide = _map(case, _widened)
        if op.unrounded:
            wide = replace(wide, kwargs={name: x for name, x in wide.kwargs.items() if name != _SPEC})
        true, true_state = _reference(op, op.unrounded or op.reference, wide)
    labels = [i.label for i in op_inputs(op, case) if i.parameter in op.mutates]
    return Expected(
        tuple(Expectation(f"output {i}", o, t) for i, (o, t) in enumerate(zip(own, true, strict=True))),
        tuple(Expectation(label, o, t) for label, o, t in zip(labels, own_state, true_state, strict=True)),
    )


def op_read(op: CustomOp[..., Any], case: Case) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """How the op's outputs for ``case`` are read: elements and scales become the numbers that they stand for."""
    return partial(_numbers, case.kwargs[_SPEC]) if op.unrounded else tuple


def _numbers(spec: QuantSpec, outputs: Sequence[Any]) -> Sequence[Any]:
    if len(outputs) < 2:
        raise ValueError(f"expected elements and scales, got {len(outputs)} outputs")
    codes, scale, *rest = outputs
    shape = spec.scales[0].shape(*codes.shape[:2])
    for what, x, wanted in (
        ("elements", codes, (codes.shape, dtype_of(spec.storage))),
        ("scales", scale, (shape, torch.float32)),
    ):
        if (tuple(x.shape), x.dtype) != (tuple(wanted[0]), wanted[1]):
            raise ValueError(f"expected {what} {wanted[1]} {list(wanted[0])}, got {x.dtype} {list(x.shape)}")
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(spec.scales[0].block[1], 1)[:, : codes.shape[1]]
    return codes.float() * scale, *rest


def _reference(
    op: CustomOp[..., Any], function: Callable[..., Any], case: Case
) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
    outputs = sequence(function(*case.args, **case.kwargs))
    return outputs, op_state(op, op_inputs(op, case)) if op.mutates else []


def sequence(result: object) -> Sequence[Any]:
    """A kernel's result as a sequence: none, one, or a tuple of outputs."""
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def _tensors(label: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{label}[{key}]", item)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().double() if x.dtype.is_floating_point else x.cpu()


def _map(case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """``case`` with ``change`` applied to each tensor, and memory of its own."""
    copied: _Storages = {}

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _copy(value, copied) if (made := change(value)) is value else made
        return {k: changed(v) for k, v in value.items()} if isinstance(value, Mapping) else copy.deepcopy(value)

    return replace(case, args=tuple(map(changed, case.args)), kwargs=changed(case.kwargs))


_Storages = dict[int, torch.UntypedStorage]
"""Copies of storages, by the address of the storage that each is a copy of."""


def _copy(x: torch.Tensor, copied: _Storages) -> torch.Tensor:
    """``x`` on a copy of its storage: views of one storage are views of one copy, as they are after ``copy.deepcopy``,
    which takes five times as long."""
    if type(x) is not torch.Tensor or x.layout is not torch.strided or x.is_conj() or x.is_neg():
        return copy.deepcopy(x)
    storage = x.untyped_storage()
    if (known := copied.get(storage._cdata)) is None:
        if x.is_contiguous() and x.nbytes == storage.nbytes():
            whole = x.clone()
            copied[storage._cdata] = whole.untyped_storage()
            return whole
        known = copied[storage._cdata] = storage.clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(known, x.storage_offset(), x.size(), x.stride())


# Side effects.

_WORD = torch.int64


def _copies(inputs: Sequence[Input], whole_storages: bool) -> list[Input]:
    copied: _Storages = {}
    copies = [_copy(i.tensor, copied) if whole_storages else i.tensor.clone() for i in inputs]
    return [Input(i.parameter, i.label, t) for i, t in zip(inputs, copies, strict=True)]


def _side_effects(call: Call, before: Sequence[Input], outputs: Sequence[object]) -> list[Fault]:
    """Compare the inputs with their copies from before. Overwrites the copies."""
    faults, writable = [], set(call.mutates)
    for index, output in enumerate(outputs):
        for given in call.inputs:
            declared = (index, given.parameter) in call.aliases
            if declared and given.parameter in writable:
                continue
            if isinstance(output, torch.Tensor) and _overlap(output, given.tensor):
                if declared:
                    writable.add(given.parameter)
                else:
                    faults.append(Fault("alias", f"output {index}", f"shares memory with {given.label}, undeclared"))
    pairs = list(zip(call.inputs, before, strict=True))
    for given, old in pairs:
        if given.parameter in writable:
            old.tensor.copy_(given.tensor)
    suspects = [(new, old) for new, old in pairs if not _same_storage(new.tensor, old.tensor)]
    changed = [(new, old, _bytes(new.tensor) != _bytes(old.tensor)) for new, old in suspects]
    for new, old, wrong in changed:
        if wrong.any():
            wrong = wrong.reshape(*new.tensor.shape, -1).any(-1)
            faults.append(Fault("mutated", new.label, f"{mismatch(wrong, old.tensor, new.tensor)}; not declared"))
    if changed and not any(wrong.any() for _, _, wrong in changed):
        faults.append(Fault("guard", changed[0][0].label, "the memory around it was written"))
    return faults


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(-1).view(torch.uint8)


def _same_storage(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Byte for byte, what lies outside the views included where the copy holds that too."""
    if new.untyped_storage().nbytes() != old.untyped_storage().nbytes():
        return torch.equal(_bytes(new), _bytes(old))
    return _equal_bytes(new.untyped_storage(), old.untyped_storage())


def _equal_bytes(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    """Of two storages of one size and device. ``torch.equal`` compares an element at a time, so it is given whole
    words; the bytes behind the last word come after them."""
    words, rest = divmod(a.nbytes(), _WORD.itemsize)

    def part(storage: torch.UntypedStorage, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, (count,), (1,))

    return all(
        torch.equal(part(a, dtype, start, count), part(b, dtype, start, count))
        for dtype, start, count in ((_WORD, 0, words), (torch.uint8, words * _WORD.itemsize, rest))
    )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share an element's address; disjoint views of one buffer do not."""
    if a.device != b.device or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (first_a, last_a), (first_b, last_b) = _extent(a), _extent(b)
    if last_a < first_b or last_b < first_a:
        return False
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The first and last byte of a tensor, counted from its storage's beginning."""
    first = x.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return int(first * x.element_size()), int((last + 1) * x.element_size() - 1 if x.numel() else -1)


def _addresses(x: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return offsets.flatten() * x.element_size()
