"""Trials of ops: the op file's own cases, in each claimed dtype, under the op's own error model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch

from hardpoint.conformance.checks import ADVERSARIAL, kernel_checks
from hardpoint.conformance.families.cache_rounding import rounded
from hardpoint.conformance.families.scaled_cache import cache_dtypes, is_scaled
from hardpoint.conformance.families.specs import claimed_input_specs
from hardpoint.conformance.families.summed_ops import summed_trials
from hardpoint.conformance.memory import Placement, place, place_far, poison, soil_allocator
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.probe import Probe, expected, run, same_bits
from hardpoint.conformance.site import Subject, TrialResources, op_of
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.ops.base import Case, CustomOp, functional_from_out, poisoned
from hardpoint.ops.judge import (
    Call,
    Expectation,
    Expected,
    Input,
    Verdict,
    judge,
    judge_call,
    op_expected,
    op_inputs,
    op_read,
    op_state,
    sequence,
)
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionSpec,
    CacheLayout,
    Contribution,
    Feature,
    OpWorkload,
    Plane,
    QuantSpec,
    Reason,
)

_HOST = torch.device("cpu")
_MANY_ROWS = (1025, 129, 33)
"""One more than tiles of 16 to 1,024 rows hold, where inputs of as many rows have few enough elements."""
_MOST_ELEMENTS = 1 << 21
_SQUARE = 128
"""Elements of a row up to which as many rows are tried, too: a kernel may take one axis for the other."""
_NOT_OF_ROWS = "rows of the results cannot be matched with rows of the inputs in this case"
_CASES_OF_A_SPEC = 3
"""How many of an op's cases are tried with a claimed spec that none of them has."""
_PLAIN = "plain"
_CACHE = "cache"
"""The parameter by which ops take an attention layer's cache as the named views of its layout."""


def cases(op: CustomOp[..., Any], dtype: torch.dtype, seed: int = 0) -> Iterator[Case]:
    """The op's cases, freshly drawn on the host."""
    return op.cases(torch.Generator().manual_seed(seed), dtype, _HOST)


def verdicts(
    op: CustomOp[..., Any], implementation: Callable[..., Any], dtype: torch.dtype, seed: int = 0
) -> list[Verdict]:
    """Judge a function on the host, on each of the op's cases. For a quick look; trials do more."""
    return [judge(op, implementation, case, dtype=dtype) for case in cases(op, dtype, seed)]


class OpTrials:
    """The generator of the family ``op``: core's ops, and every op that a plugin brings as a ``CustomOp``."""

    family = "op"

    def serves(self, contribution: Contribution) -> bool:
        """All ops: each brings its own cases."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Each case of the op in each dtype and cache layout that is claimed."""
        op = op_of(subject.site.plugins, str(subject.offer.contribution.of))
        if op.sums is not None:
            yield from summed_trials(subject, op, plan)
            return
        caches = [cache for name in subject.claimed("layout") or (_PLAIN,) for cache in _caches(subject, str(name))]
        for number, (dtype, cache) in enumerate((d, cache) for d in subject.dtypes() for cache in caches):
            drawn = list(cases(op, dtype_of(dtype), plan.seed))
            for index, case in enumerate(drawn):
                yield _trial(OpProbe(subject, op, dtype, case, cache), plan, index + number)
            for index, (case, spec) in enumerate(_with_other_specs(drawn, claimed_input_specs(subject))):
                yield _trial(OpProbe(subject, op, dtype, case, cache, rounds_to=spec), plan, index + number)


def _with_other_specs(drawn: Sequence[Case], specs: Sequence[QuantSpec]) -> Iterator[tuple[Case, QuantSpec]]:
    """The first few cases of an op that rounds its result, each with those of ``specs`` that no case has."""
    rounding = [case for case in drawn if "spec" in case.workload]
    known = [case.workload["spec"] for case in rounding]
    alike = [case for case in rounding if case.workload["spec"] == known[0]]
    for spec in specs:
        if spec not in known:
            yield from ((case, spec) for case in alike[:_CASES_OF_A_SPEC])


def _in_spec(case: Case, spec: QuantSpec) -> Case:
    """``case`` with its result rounded to ``spec``."""
    return replace(
        case,
        name=f"{case.name}_as_{spec}",
        kwargs={**case.kwargs, "spec": spec},
        workload={**case.workload, "spec": spec},
    )


@dataclass(frozen=True)
class _Cache:
    """A cache layout, by name, and its elements' dtype; None: the op's own. ``backend`` is whose layout it is."""

    layout: str = _PLAIN
    dtype: str | None = None
    backend: Subject | None = None

    @property
    def title(self) -> str:
        """The suffix for a case's name."""
        return (f"/{self.layout}" if self.layout != _PLAIN else "") + (f"/kv-{self.dtype}" if self.dtype else "")


def _caches(subject: Subject, layout: str) -> list[_Cache]:
    """A layout in each dtype that stands for other numbers than it is given, or as the op's inputs are.

    Of several attention backends that have it, the plugin's own says which.
    """
    site, plugin = subject.site, subject.offer.plugin
    offers = [o for o in site.plugins.offers("attention", "causal") if o.contribution.layout == layout]
    if layout == _PLAIN or not offers:
        return [_Cache(layout)]
    backend = Subject.load(min(offers, key=lambda o: o.plugin != plugin), site)
    scaled = [dtype for dtype in cache_dtypes(backend) if is_scaled(dtype)]
    return [_Cache(layout, dtype, backend) for dtype in scaled] or [_Cache(layout, None, backend)]


def _trial(probe: OpProbe, plan: Plan, number: int) -> Trial:
    seed = plan.seed_of(f"{probe.subject.offer.contribution}/{probe.title}")
    if reason := probe.refused():
        return Trial(probe.title, unsupported=reason, workload=probe.workload)
    is_empty = not op_inputs(probe.op, probe.drawn)[0].tensor.numel()
    checks = kernel_checks(probe, seed, plan, number, without=tuple(ADVERSARIAL) if is_empty else ())
    if probe.op.allocate is not None:
        checks.append(Check("fake", partial(fake, probe, seed)))
    if not is_empty and not probe.op.mutates and plan.includes(number, 0):
        checks.append(Check("rows", partial(rows, probe, seed)))
    if Feature.BATCH_INVARIANT in probe.subject.features and not is_empty:
        alike = OpProbe(
            probe.subject,
            probe.op,
            probe.dtype,
            probe.drawn,
            probe.cache,
            rounds_to=probe.rounds_to,
            batch_invariant=True,
        )
        checks.append(Check("batch-invariant", partial(batch_invariant, alike, seed)))
    return Trial(probe.title, checks, workload=probe.workload)


class OpProbe:
    """One implementation of an op, on one case of it; ``cache`` is what ops are given that write one.

    ``rounds_to`` replaces the spec that the case rounds its result to. With ``batch_invariant``, a factory's parts are
    those of a batch-invariant engine.
    """

    allocates = True

    def __init__(
        self,
        subject: Subject,
        op: CustomOp[..., Any],
        dtype: str,
        case: Case,
        cache: _Cache = _Cache(),  # it never changes
        *,
        rounds_to: QuantSpec | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.subject, self.op, self.dtype, self.drawn, self.cache = subject, op, dtype, case, cache
        self.rounds_to, self._batch_invariant = rounds_to, batch_invariant
        case = case if rounds_to is None else _in_spec(case, rounds_to)
        self.title = f"{dtype}/{case.name}{cache.title}"
        more: dict[str, Any] = {"layout": cache.layout} if op.mutates else {}
        more |= {"kv_dtype": cache.dtype} if cache.dtype else {}
        more |= case.workload  # which may say the layout of a cache of the op's own
        self.workload = OpWorkload(of=op.name, dtype=dtype, **more, scalars=op.scalars_in(case))
        self._cases: dict[int, Case] = {}
        self._expected: dict[tuple[int, tuple[int, ...] | None], Expected] = {}
        self._plain = next((i.tensor for i in op_inputs(op, case) if i.parameter == _CACHE), None)

    def refused(self) -> Reason | None:
        """Why this case is not for the contribution."""
        reason = self.subject.refuses(self.workload)
        layout, backend = self.cache.layout, self.cache.backend
        if reason or layout == _PLAIN:
            return reason
        if self._plain is None:
            return Reason("layout", f"op {self.op.name} takes caches of layout {_PLAIN} alone", wanted=layout)
        if backend is None:
            return Reason("layout", f"no installed attention backend has the layout {layout!r}")
        return backend.refuses(self._spec.workload())

    def case(self, seed: int) -> Case:
        """The case as ``seed`` draws it, which nobody may write to."""
        if seed not in self._cases:
            drawn = cases(self.op, dtype_of(self.dtype), seed)
            case = next(case for case in drawn if case.name == self.drawn.name)
            self._cases[seed] = case if self.rounds_to is None else _in_spec(case, self.rounds_to)
        return self._cases[seed]

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
    ) -> Call:
        """See Probe."""
        case = self.case(seed)
        if order is not None:
            case = _reordered(self.op, case, order)
        op, form = self.op, self.subject.offer.contribution.form
        arguments = inspect.signature(op.reference).bind(*case.args, **case.kwargs)
        foreign: _ForeignCache | None = None
        for name, value in arguments.arguments.items():
            if name == _CACHE and self.cache.backend:
                kind = cast("type[AttentionBackend]", self.cache.backend.target)
                foreign = _ForeignCache.holding(kind.layout, value, self._spec.kv_dtype, self.subject.site.device)
                arguments.arguments[name] = foreign.views
            else:
                arguments.arguments[name] = self._placed(name, name, value, placement, far)
        placed = replace(case, args=arguments.args, kwargs=arguments.kwargs)
        inputs = [i for i in op_inputs(op, placed) if not (foreign and i.parameter == _CACHE)]
        if foreign:
            inputs.append(Input(_CACHE, _CACHE, foreign.buffer))
        like = sequence(op.allocate(*placed.args, **placed.kwargs)) if op.allocate else ()
        owned: tuple[torch.Tensor, ...] = ()
        kernel = self._kernel
        if form == "out":
            owned = tuple(place(x, x.device) for x in like)
            outputs = owned[0] if len(owned) == 1 else owned
            kernel = functional_from_out(kernel, lambda *args, **kwargs: outputs, op.reference)
            inputs += [Input(f"output {i}", f"output {i}", x) for i, x in enumerate(owned)]

        def idle() -> object:
            if owned or op.allocate is None:
                return owned or None
            return poisoned(op.allocate)(*placed.args, **placed.kwargs)

        def before() -> None:
            poison(owned)
            soil_allocator(like)
            cast(TrialResources, self._context.resources).spoil()

        def expect() -> Expected:
            drawn = (seed, None if order is None else tuple(order))
            if drawn not in self._expected:  # most checks of a trial draw the same inputs
                expected = op_expected(op, case)
                if foreign and is_scaled(foreign.dtype):  # it holds numbers rounded, by no more than it must
                    state = [replace(e, own=rounded(e.own, foreign.plane)) for e in expected.state]
                    expected = replace(expected, state=tuple(state))
                self._expected[drawn] = expected
            return self._expected[drawn]

        names = frozenset(f"output {i}" for i in range(len(owned)))
        return Call(
            inputs=tuple(inputs),
            run=lambda: kernel(*placed.args, **placed.kwargs),
            state=foreign.logical if foreign else lambda: op_state(op, inputs),
            expect=expect,
            errors=op.errors,
            read=op_read(op, placed),
            idle=idle,
            before=before,
            mutates=frozenset(op.mutates) | names,
            aliases=frozenset(op.aliases) | {(i, f"output {i}") for i in range(len(owned))},
        )

    def num_rows(self, call: Call) -> int:
        """The first input's first axis: tokens or requests."""
        if not self.op.has_rows:
            return 0
        first = call.inputs[0].tensor
        return first.shape[0] if first.dim() else 0

    def not_recorded(self) -> str | None:
        """Ops are recorded with the steps that call them."""
        return None if self.subject.capturable else "the target declares capturable = False"

    def far_inputs(self, call: Call) -> Sequence[str]:
        """The first floating-point input with rows, and the caches."""
        able = [i for i in call.inputs if i.tensor.dim() >= 2 and i.tensor.shape[0] >= 2]
        able = [i for i in able if i.tensor.is_floating_point() and not i.label.startswith("output ")]
        read = [i.label for i in able if i.parameter not in self.op.mutates]
        return [*read[:1], *(i.label for i in able if i.parameter in self.op.mutates)]

    def _placed(self, parameter: str, label: str, value: Any, placement: Placement, far: str | None) -> Any:
        site = self.subject.site
        if isinstance(value, Mapping):
            return {k: self._placed(parameter, f"{label}[{k}]", x, placement, far) for k, x in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if label == far:
            return place_far(value, site.device, site.free_bytes)
        return place(value, site.device, Placement.AS_DRAWN if parameter in self.op.mutates or far else placement)

    @cached_property
    def _context(self) -> Any:
        kv_dtype = self.cache.dtype
        return self.subject.site.context(self.dtype, batch_invariant=self._batch_invariant, kv_dtype=kv_dtype)

    @cached_property
    def _kernel(self) -> Callable[..., Any]:
        """The target, or what it makes for this workload."""
        subject, ctx = self.subject, self._context
        if subject.offer.contribution.form != "factory":
            return cast("Callable[..., Any]", subject.target)
        parts: dict[str, Callable[..., Any]] = {}
        if owner := self.cache.backend:
            backend = owner.target(ctx.for_plugin(owner.offer.plugin), self._spec)
            parts = {"store": cast(AttentionBackend, backend).store}
        kernel = subject.target(ctx.for_plugin(subject.offer.plugin), self.workload, parts)
        ctx.resources.allocate(subject.site.device)
        return cast("Callable[..., Any]", kernel)

    @property
    def _spec(self) -> AttentionSpec:
        """The attention layer whose cache the case writes."""
        assert self._plain is not None
        _, block_size, heads, size = self._plain.shape
        kv_dtype = self.cache.dtype or dtype_name(self._plain.dtype)
        return AttentionSpec(heads, heads, size, size**-0.5, self.dtype, kv_dtype, block_size)


@dataclass(frozen=True)
class _ForeignCache:
    """A cache in a layout other than plain, in guarded memory."""

    layout: CacheLayout
    dtype: str
    plane: Plane
    buffer: torch.Tensor
    views: dict[str, torch.Tensor]
    pages: torch.Tensor

    @classmethod
    def holding(
        cls, layout: CacheLayout, plain: Mapping[str, torch.Tensor], dtype: str, device: torch.device
    ) -> _ForeignCache:
        """The keys and values of ``plain``, each [pages, block, K, D], in ``layout``, as elements of ``dtype``."""
        count, block_size, heads, size = plain["k"].shape
        spec = AttentionSpec(heads, heads, size, 1.0, dtype, dtype, block_size).cache_spec
        zeros = torch.zeros(count * layout.page_bytes(spec, block_size), dtype=torch.uint8)
        buffer = place(zeros, device)
        views, pages = layout.views(buffer, count, spec, block_size), torch.arange(count, device=device)
        layout.from_logical(views, pages, {name: plain[name].to(device) for name in ("k", "v")})
        return cls(layout, dtype, spec["k"], buffer, views, pages)

    def logical(self) -> Sequence[torch.Tensor]:
        """Keys and values without the null page, as ``plain`` had them; float32 where they are rounded."""
        planes = self.layout.to_logical(self.views, self.pages)
        found = [planes[name][1:] for name in ("k", "v")]
        return [x.float() for x in found] if is_scaled(self.dtype) else found


def _reordered(op: CustomOp[..., Any], case: Case, order: Sequence[int]) -> Case:
    """``case`` with rows ``order`` of each input that has as many rows as the first; what is mutated stays."""
    arguments = inspect.signature(op.reference).bind(*case.args, **case.kwargs)
    rows = op_inputs(op, case)[0].tensor.shape[0]
    for name, value in arguments.arguments.items():
        if name not in op.mutates and isinstance(value, torch.Tensor) and value.shape[:1] == (rows,):
            arguments.arguments[name] = value[torch.tensor(order)]
    return replace(case, args=arguments.args, kwargs=arguments.kwargs)


def _without_data(value: Any) -> Any:
    """``value`` with tensors on the meta device for its tensors."""
    if isinstance(value, Mapping):
        return {key: _without_data(item) for key, item in value.items()}
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def fake(probe: OpProbe, seed: int) -> Finding:
    """``fake``: what the op's ``allocate`` says of shapes and dtypes without data is what the kernel returns."""
    call = probe.call(seed)
    results = run(call)
    case, allocate = probe.case(seed), probe.op.allocate
    assert allocate is not None
    given = {name: _without_data(value) for name, value in case.kwargs.items()}
    promised = sequence(allocate(*map(_without_data, case.args), **given))
    shapes = [(tuple(x.shape), x.dtype) for x in promised]
    for i, (result, (shape, dtype)) in enumerate(zip(results, shapes, strict=False)):
        if (tuple(result.shape), result.dtype) != (shape, dtype):
            message = f"promised {list(shape)} {dtype}, got {list(result.shape)} {result.dtype}"
            return Finding.failed("fake", f"output {i}", message)
    return Finding()


def rows(probe: Probe, seed: int) -> Finding:
    """``rows``: as many rows as fill several tiles and one row of another, among them few that differ.

    Where rows are short, also as many rows as a row has elements.
    """
    call = probe.call(seed)
    count, size = probe.num_rows(call), max((i.tensor.numel() for i in call.inputs), default=0)
    if not count:
        return _no_rows(call)
    width = size // count
    sizes = [next((n for n in _MANY_ROWS if n * width <= _MOST_ELEMENTS), _MANY_ROWS[-1])]
    for many in [width, *sizes] if 1 < width <= _SQUARE else sizes:
        order = torch.randint(count, (many,), generator=torch.Generator().manual_seed(seed))
        part = probe.call(seed, order=order.tolist())
        if not _are_rows(call.expect().outputs, _reordered_truth(part), order):
            return Finding.not_claimed("no-rows", _NOT_OF_ROWS)
        finding = Finding.of(judge_call(part))
        if finding.faults:
            break
    return finding


def batch_invariant(probe: Probe, seed: int, *, has_rows: bool = False) -> Finding:
    """``batch-invariant``: a row alone, or among other rows, has the same bits.

    ``has_rows`` says that results belong to rows of the inputs; otherwise the reference is asked.
    """
    call = probe.call(seed)
    count = probe.num_rows(call)
    if not count:
        return _no_rows(call)
    whole = _outputs(call)
    for order in ([0], [count - 1], [*range(1, count), 0], list(range(0, count, 2))):
        index, part = torch.tensor(order), probe.call(seed, order=order)
        if not has_rows and not _are_rows(call.expect().outputs, _reordered_truth(part), index):
            return Finding.not_claimed("no-rows", _NOT_OF_ROWS)
        if not same_bits(_outputs(part), [y[index.to(y.device)] for y in whole]):
            return Finding.failed("batch-variant", "outputs", f"rows {order[:8]} by themselves have other bits")
    return Finding()


def _no_rows(call: Call) -> Finding:
    """Why nothing can be tried row by row: the inputs are empty, or the op has no rows."""
    is_empty = any(not i.tensor.numel() for i in call.inputs)
    return Finding.not_claimed("no-rows", "the inputs of this case are empty" if is_empty else _NOT_OF_ROWS)


def _outputs(call: Call) -> Sequence[torch.Tensor]:
    """The tensors that the kernel returns, without the ones that it changes."""
    results = run(call)
    return results[: len(results) - len(call.state())]


def _reordered_truth(part: Call) -> Sequence[Expectation]:
    """The expected results for picked rows; none where the reference refuses them."""
    truth = expected(part)
    return truth.outputs if truth else ()


def _are_rows(whole: Sequence[Expectation], part: Sequence[Expectation], index: torch.Tensor) -> bool:
    """Whether the reference itself gives the rows of ``part`` what it gives them among all rows."""
    if not whole or len(part) != len(whole):
        return False
    pairs = [(a.truth, b.truth) for a, b in zip(whole, part, strict=True)]
    return all(
        a.dim() and b.shape == (len(index), *a.shape[1:]) and torch.allclose(a[index], b, equal_nan=True)
        for a, b in pairs
    )
