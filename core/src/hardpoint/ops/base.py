"""``CustomOp``: a named pure op with a plain PyTorch reference, and one implementation bound at construction.

An op is a function over tensors and keyword-only scalars. Its file holds everything about it: signature, reference,
case generator, error model. Implementations are contributions of the family ``op``; the reference itself is one, in
core's own manifest. ``bind`` asks the selector once and returns the chosen function itself, so that a bound op costs
no more than the call.
"""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import torch

from hardpoint.dtypes import dtype_name
from hardpoint.ops.error_model import ErrorModel
from hardpoint.plugin_host.blame import blame, misbehaved
from hardpoint.plugin_host.signatures import op_misfit
from hardpoint_plugin_api import GroupMember, OpWorkload, PluginLoadError, ScalarValue

if TYPE_CHECKING:
    from hardpoint.context import Context
    from hardpoint.plugin_host import Offer

P = ParamSpec("P")
R = TypeVar("R")
Scalars = tuple[tuple[str, ScalarValue], ...]
"""The field of OpWorkload: static arguments' names and values, in the op's order."""


@dataclass(frozen=True)
class Case:
    """One set of inputs for an op: positional tensors and keyword scalars, freshly drawn.

    ``workload`` are the fields of OpWorkload, beside the dtype, that a use with these inputs would be selected by.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)


CaseGenerator = Callable[[torch.Generator, torch.dtype, torch.device], Iterator[Case]]
"""Draws an op's cases: random, extreme, strided, empty and odd-sized inputs of a dtype on a device."""


class CustomOp(Generic[P, R]):
    """A named op. ``reference`` is the definition that every implementation is compared with.

    ``mutates``: the parameters that the op writes to. ``aliases``: (output index, parameter) pairs that may share
    memory. ``allocate`` returns empty outputs for given inputs; it turns an implementation that writes into the
    caller's outputs into a function, and is the op's fake under compilation.

    ``unrounded``: for an op whose first result is quantized to ``spec`` (elements and scales), the same computation
    without quantization; results are judged by the numbers that they stand for, see quantize_rows.py.

    ``static``: keyword arguments that have the same value in every call of a use. ``bind`` gets these values, and
    implementations may require some: ``requires = [{ scalar = { interleaved = false } }]``.

    ``fusible``: the reference is a few torch operators without loops, which a compiler fuses with those around.

    ``sums``: the parameter that is first summed over the ranks of ``tp``. Each rank passes its own partial sum, which
    may be written to; the reference gets the sum. Such an op is bound where there are several ranks, and its
    implementations are factories, since they need the group. See GroupMember.

    ``has_rows`` False: the first axis of the first input does not correspond to rows of the results; the conformance
    kit then does not permute rows.
    """

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        cases: CaseGenerator,
        errors: ErrorModel,
        allocate: Callable[P, R] | None = None,
        mutates: Sequence[str] = (),
        aliases: Sequence[tuple[int, str]] = (),
        unrounded: Callable[..., Any] | None = None,
        sums: str | None = None,
        has_rows: bool = True,
        static: Sequence[str] = (),
        fusible: bool = False,
    ) -> None:
        self.name, self.unrounded, self.sums, self.has_rows = reference.__name__, unrounded, sums, has_rows
        self.fusible = fusible
        self.static = tuple(static)
        scalars = {p.name for p in inspect.signature(reference).parameters.values() if p.kind is p.KEYWORD_ONLY}
        if unknown := set(static) - scalars:
            raise ValueError(f"op {self.name}: static arguments must be keyword-only, got {', '.join(sorted(unknown))}")
        self.reference, self.cases, self.errors, self.allocate = reference, cases, errors, allocate
        self.mutates, self.aliases = tuple(mutates), tuple(aliases)
        self.__doc__ = reference.__doc__

    def __repr__(self) -> str:
        return f"CustomOp({self.name!r})"

    def bind(
        self,
        ctx: Context,
        *,
        parts: Mapping[str, Callable[..., Any]] | None = None,
        scalars: Mapping[str, ScalarValue] | None = None,
        **workload: Any,
    ) -> Callable[P, R]:
        """Select an implementation for one use, and return it as a function with the reference's signature.

        ``workload``: fields of OpWorkload besides the dtype. ``parts``: functions that a factory may build on (a
        composite's default takes them from here or binds its own). ``scalars``: the values of ``static`` arguments in
        every call of this use, which must pass the same values. Raises TypeError for an argument that is not static;
        SelectionError or PluginLoadError with every reason.
        """
        if self.sums is not None:
            ranks = ctx.parallel.tp.size
            workload = {"parallel": "tp", "ranks": ranks, "features": ctx.group_features, **workload}
        workload = {"dtype": dtype_name(ctx.dtype), "scalars": self.scalars_of(scalars or {}), **workload}
        wanted = OpWorkload(of=self.name, **workload)
        plan = ctx.select(wanted)
        functions = [self._functional(ctx, entry.offer, plan.workload, parts or {}) for entry in plan.entries]
        if ctx.shadow is not None:
            pairs = zip(plan.entries, functions, strict=True)
            functions = [ctx.shadow.watch(self, entry.offer, wanted, f) for entry, f in pairs]
        if ctx.call_names is not None:
            name = ctx.call_names.name
            functions = [name(entry.offer, wanted, f) for entry, f in zip(plan.entries, functions, strict=True)]
        functions = [
            ctx.kernel_calls.wrap(entry.offer, ctx.load(entry.offer), f, self.mutates, self.errors, self.allocate)
            for entry, f in zip(plan.entries, functions, strict=True)
        ]
        bound = by_tokens([entry.range.max for entry in plan.entries], functions)
        if ctx.op_tracing is None:
            return bound
        return ctx.op_tracing.wrap(self.name, bound, self.reference, self.fusible)

    def scalars_of(self, values: Mapping[str, Any]) -> Scalars:
        """The field ``scalars`` of this op's workload for these values of static arguments; TypeError for others."""
        if unknown := values.keys() - set(self.static):
            known = ", ".join(self.static) or "none"
            raise TypeError(f"op {self.name}: {', '.join(sorted(unknown))} not among its static arguments ({known})")
        return tuple((name, values[name]) for name in self.static if name in values)

    def scalars_in(self, case: Case) -> Scalars:
        """The field ``scalars`` of the workload of a use that calls the op as ``case`` does."""
        arguments = inspect.signature(self.reference).bind(*case.args, **case.kwargs)
        arguments.apply_defaults()
        return self.scalars_of({name: arguments.arguments[name] for name in self.static})

    def told(self, workload: OpWorkload) -> dict[str, ScalarValue]:
        """The static arguments of this op that ``workload``, of an op composed of this one, gives."""
        return {name: value for name, value in workload.scalars if name in self.static}

    def _functional(
        self, ctx: Context, offer: Offer, workload: object, parts: Mapping[str, Callable[..., Any]]
    ) -> Callable[P, R]:
        target = ctx.load(offer)
        if not callable(target):
            raise misbehaved(offer, f"is {target!r}, which cannot be called")
        form = offer.contribution.form
        if form == "factory":

            def make() -> Callable[P, R]:
                with blame(offer):
                    function = target(ctx.for_plugin(offer.plugin), workload, parts)
                if not callable(function):
                    raise misbehaved(offer, f"returned {function!r}, which cannot be called")
                if fault := op_misfit(function, self.reference, "functional"):
                    raise misbehaved(offer, f"returned what {fault}")
                if self.sums is not None and isinstance(function, GroupMember):
                    ctx.adopt(offer, function)
                return cast(Callable[P, R], function)

            return make() if self.sums is None else ctx.shared((offer, workload), make)
        if self.sums is not None:
            raise PluginLoadError(
                f"op {self.name!r} sums {self.sums!r} over the ranks of a group, which {offer.contribution.name!r} of "
                f"plugin {offer.plugin!r} cannot know of: declare form = 'factory' and take it from ctx.parallel.tp"
            )
        if form == "out":
            if self.allocate is None:
                raise PluginLoadError(
                    f"op {self.name!r} has no outputs, it mutates its inputs: {offer.contribution.name!r} of plugin "
                    f"{offer.plugin!r} cannot be of form 'out'; declare form = 'functional'"
                )
            return functional_from_out(target, self.allocate, self.reference)
        return cast(Callable[P, R], target)


def custom_op(
    *,
    cases: CaseGenerator,
    errors: ErrorModel,
    allocate: Callable[..., Any] | None = None,
    mutates: Sequence[str] = (),
    aliases: Sequence[tuple[int, str]] = (),
    unrounded: Callable[..., Any] | None = None,
    sums: str | None = None,
    has_rows: bool = True,
    static: Sequence[str] = (),
    fusible: bool = False,
) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Turn a reference function into a CustomOp of the function's name."""
    return lambda reference: CustomOp(
        reference,
        cases=cases,
        errors=errors,
        allocate=allocate,
        mutates=mutates,
        aliases=aliases,
        unrounded=unrounded,
        sums=sums,
        has_rows=has_rows,
        static=static,
        fusible=fusible,
    )


def functional_from_out(
    out_form: Callable[..., None], allocate: Callable[P, R], reference: Callable[P, R]
) -> Callable[P, R]:
    """Derive ``f(inputs) -> outputs`` from ``f(inputs, *outputs) -> None``.

    Inputs that a caller leaves out get the defaults of ``reference``, so that the outputs stand where they belong.
    """
    inputs = [p for p in inspect.signature(reference).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

    @functools.wraps(out_form)
    def functional(*args: P.args, **kwargs: P.kwargs) -> R:
        outputs = allocate(*args, **kwargs)
        rest = [kwargs.pop(p.name, p.default) for p in inputs[len(args) :]]
        out_form(*args, *rest, *(outputs if isinstance(outputs, tuple) else (outputs,)), **kwargs)
        return outputs

    return functional


def poisoned(allocate: Callable[P, R]) -> Callable[P, R]:
    """``allocate`` with outputs full of NaN, or of the lowest integer: what a kernel forgets to write then shows."""

    @functools.wraps(allocate)
    def fill(*args: P.args, **kwargs: P.kwargs) -> R:
        outputs = allocate(*args, **kwargs)
        for output in cast(tuple[torch.Tensor, ...], outputs if isinstance(outputs, tuple) else (outputs,)):
            output.fill_(float("nan") if output.dtype.is_floating_point else torch.iinfo(output.dtype).min)
        return outputs

    return fill


def by_tokens(
    limits: Sequence[int | None],
    functions: Sequence[Callable[P, R]],
    num_tokens: Callable[[Any], int] = lambda x: cast(int, x.shape[0]),
) -> Callable[P, R]:
    """Join the winners of a plan's token ranges behind one comparison of the first argument's ``num_tokens``.

    ``limits`` are the ranges' inclusive upper ends, ascending, the last one None. One function is returned as it is.
    """
    if len(functions) == 1:
        return functions[0]
    uppers = [limit for limit in limits if limit is not None]

    def dispatch(first: object, *args: Any, **kwargs: Any) -> R:
        chosen = cast(Callable[..., R], functions[bisect.bisect_left(uppers, num_tokens(first))])
        return chosen(first, *args, **kwargs)

    return cast(Callable[P, R], dispatch)
