"""Trials of layer replacements: against the default layer with the same weights, through a layer's whole life.

The truth is the default layer in float64 on the host; its own error is that of the default layer in the trial's dtype.

Axes: T tokens, n hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import cast

import torch

from hardpoint.conformance.checks import kernel_checks
from hardpoint.conformance.families.draft_steps import DRAFTED, why_no_drafts
from hardpoint.conformance.families.layer_kinds import KINDS, Inputs, LayerKind
from hardpoint.conformance.families.step_memory import Pieces, StepMemory, kept_rows, num_found, rows_of
from hardpoint.conformance.families.steps import Piece
from hardpoint.conformance.memory import Placement, place, place_far, soil_allocator
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.probe import run, same_bits
from hardpoint.conformance.site import Subject, TrialResources
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.layers.base import PluggableLayer, walk
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.judge import Call, Expectation, Expected, Input, sequence
from hardpoint_plugin_api import (
    Contribution,
    Feature,
    HardpointError,
    LayerWorkload,
    WeightSlot,
)

ERRORS = ErrorModel(scale="row", finest=2.0**-20)
_NOT_OF_LAYERS = ("far",)
"""A layer's own tensors are many and small: that offsets do not overflow is for its ops and kernels to prove."""
_NOT_OF_DRAFTS = (*_NOT_OF_LAYERS, "offset", "apart", "replay", "host-sync", "allocation", "threads", "streams")
"""Drafts change which states and positions a step reads and writes, and nothing that these checks ask."""
_HOST = torch.device("cpu")
_BLOCK = 16


class LayerTrials:
    """The generator of the family ``layer`` for the layers in ``kinds``. Plugins make one for layers of their own."""

    family = "layer"

    def __init__(self, kinds: Mapping[str, LayerKind] | None = None) -> None:
        self.kinds = KINDS if kinds is None else kinds

    def serves(self, contribution: Contribution) -> bool:
        """Whether it knows the layer that is replaced."""
        return contribution.of in self.kinds

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Each variation of the layer in each claimed dtype, on batches of several sizes. With a cache, also drafts."""
        kind, dtypes, number = self.kinds[str(subject.offer.contribution.of)], subject.dtypes(), 0
        for dtype in dtypes:
            for name in kind.variations:
                yield _life_trial(LayerProbe(subject, kind, dtype, name, kind.tokens[-1]), plan)
                for tokens in kind.tokens:
                    yield _forward_trial(LayerProbe(subject, kind, dtype, name, tokens), plan, number)
                    number += 1
        drafted = [name for name in kind.variations if kind.pieces and name not in kind.without_drafts]
        if not drafted or not dtypes:
            return
        factors = {"dtype": dtypes, "variation": drafted, "num_drafts": tuple(DRAFTED)}
        for trial, row in enumerate(plan.combinations(factors), number):
            yield _forward_trial(LayerProbe(subject, kind, **row), plan, trial)


def _life_trial(probe: LayerProbe, plan: Plan) -> Trial:
    title = f"{probe.dtype}/{probe.variation}/life"
    checks = (Check("slots", partial(slots, probe), decisive=True), Check("lifecycle", partial(lifecycle, probe)))
    return _unless_refused(probe, title, checks)


def _forward_trial(probe: LayerProbe, plan: Plan, number: int) -> Trial:
    seed = plan.seed_of(f"{probe.subject.offer.contribution}/{probe.title}")
    checks = kernel_checks(probe, seed, plan, number, without=_NOT_OF_DRAFTS if probe.num_drafts else _NOT_OF_LAYERS)
    if Feature.BATCH_INVARIANT in probe.subject.features and not probe.num_drafts:
        checks.append(Check("batch-invariant", partial(batch_invariant, probe, seed)))
    return _unless_refused(probe, probe.title, checks)


def _unless_refused(probe: LayerProbe, title: str, checks: Sequence[Check]) -> Trial:
    """A manifest cannot speak of arguments and drafts.

    Arguments are refused by ``supports``, or by the constructor with an error, drafts by the planner of a state.
    """
    if reason := probe.subject.refuses(probe.workload):
        return Trial(title, unsupported=reason, workload=probe.workload)

    def unless_refused(check: Check) -> Finding:
        try:
            probe.layer  # noqa: B018  # constructed on first use
        except HardpointError as error:
            return Finding.not_claimed("refused", str(error))
        if probe.num_drafts and (reason := why_no_drafts(probe.context)):
            return Finding(unsupported=reason)
        return check.run()

    guarded = [Check(c.name, partial(unless_refused, c), c.decisive) for c in checks]
    return Trial(title, guarded, workload=probe.workload)


class LayerProbe:
    """One layer with one set of arguments, on steps of one size, or that verify drafts."""

    allocates = True

    def __init__(
        self,
        subject: Subject,
        kind: LayerKind,
        dtype: str,
        variation: str,
        tokens: int = 0,
        *,
        batch_invariant: bool = False,
        num_drafts: int = 0,
    ) -> None:
        """``tokens`` of each call; those of the steps of ``DRAFTED``, where there are ``num_drafts``."""
        self.subject, self.kind, self.dtype, self.variation = subject, kind, dtype, variation
        self.batch_invariant, self.num_drafts = batch_invariant, num_drafts
        self.pieces = DRAFTED[num_drafts] if num_drafts else kind.pieces
        self.tokens = sum(piece.query for step in self.pieces for piece in step) if num_drafts else tokens
        self.args = kind.variations[variation]
        self.title = f"{dtype}/{variation}/{f'drafts-{num_drafts}' if num_drafts else f'tokens-{tokens}'}"
        features: frozenset[Feature] = getattr(self.args, "features", frozenset())
        self.workload = LayerWorkload(of=subject.offer.contribution.of, dtype=dtype, args=self.args, features=features)

    @cached_property
    def context(self) -> Context:
        """The layer's build context."""
        return self.subject.site.context(self.dtype, batch_invariant=self.batch_invariant, num_drafts=self.num_drafts)

    @cached_property
    def layer(self) -> PluggableLayer:
        """The layer under trial, without weights. Raises what its constructor raises."""
        made = self.subject.target(self.context.for_plugin(self.subject.offer.plugin), self.args)
        assert isinstance(made, PluggableLayer), f"{self.subject.offer.contribution.target} makes no PluggableLayer"
        return made

    @cached_property
    def loaded(self) -> PluggableLayer:
        """The layer with its weights, prepared and bound."""
        self.load()
        self.context.resources.allocate(self.subject.site.device)
        for _, layer in walk(self.layer):
            layer.bind()
        return self.layer

    def load(self) -> None:
        """Give every slot its weight and prepare the layers, innermost first."""
        _load(self.layer, self.weights, self.subject.site.device)

    @cached_property
    def default(self) -> tuple[PluggableLayer, Context]:
        """The default layer, without weights, on the host in the trial's dtype."""
        return self._default(dtype_of(self.dtype))

    def _default(self, dtype: torch.dtype) -> tuple[PluggableLayer, Context]:
        ctx = self.subject.site.context(dtype, device=_HOST)
        offer = ctx.select(self.workload).offer
        return cast("Callable[..., PluggableLayer]", ctx.load(offer))(ctx, self.args), ctx

    @cached_property
    def references(self) -> tuple[tuple[PluggableLayer, Context], tuple[PluggableLayer, Context]]:
        """The default layer with the same weights: in the trial's dtype, and in float64."""
        made = (self.default, self._default(torch.float64))
        for layer, ctx in made:
            _load(layer, self.weights, _HOST, wide=ctx.dtype == torch.float64)
            ctx.resources.allocate(_HOST)
            for _, part in walk(layer):
                part.bind()
        return made

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """Random weights by the path of their slot, on the host: near one for vectors, small for matrices."""
        generator = torch.Generator().manual_seed(2)
        made = {}
        for path, slot in declared(self.default[0]).items():
            w = torch.randn(slot.shape, generator=generator)
            fan_in = slot.shape[-1]
            made[path] = (w * 2 * fan_in**-0.5 if w.dim() > 1 else 1 + 0.3 * w).to(dtype_of(slot.dtype))
        return made | {path: w.to(made[path].dtype) for path, w in self.kind.weights(self.args).items()}

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
    ) -> Call:
        """See Probe."""
        device, dtype = self.subject.site.device, dtype_of(self.dtype)
        drawn = self.kind.draw(self.args, self.tokens, torch.Generator().manual_seed(seed))
        if order is not None:
            drawn = {name: x[torch.tensor(order)] for name, x in drawn.items()}
        drawn = {name: x.to(dtype) if x.is_floating_point() else x for name, x in drawn.items()}
        layer = self.loaded
        placed = {
            name: place_far(x, device, self.subject.site.free_bytes) if name == far else place(x, device, placement)
            for name, x in drawn.items()
        }
        memory = StepMemory(self.context, device, self.pieces, padded=True)
        weights = [(f"{path}.{name}", w) for path, part in walk(layer) for name, w in part.weights.items()]
        inputs = [*placed.items(), *((name.lstrip("."), w) for name, w in weights)]
        named = tuple(Input(name, name, x) for name, x in inputs if isinstance(x, torch.Tensor))

        def before() -> None:
            memory.spoil()
            soil_allocator(placed.values())
            cast(TrialResources, self.context.resources).spoil()

        return Call(
            inputs=named,
            run=lambda: self._run(layer, placed, memory),
            idle=lambda: tuple(
                torch.full_like(e.own, float("nan"), device=device) for e in self._expected(drawn).outputs
            ),
            expect=lambda: self._expected(drawn),
            errors=ERRORS,
            before=before,
            aliases=self.kind.aliases,
        )

    def _run(self, layer: PluggableLayer, inputs: Inputs, memory: StepMemory) -> object:
        """The layer's results, without rows that are padding, or of drafts that are refused."""
        made = self.kind.forward(layer, inputs, memory.steps)
        if not self.pieces:
            return made
        kept = torch.tensor(memory.kept, device=memory.device)
        return tuple(y[kept] if len(y) > int(kept[-1]) else y for y in sequence(made))

    def _expected(self, drawn: Inputs) -> Expected:
        results = []
        for (layer, ctx), dtype in zip(self.references, (dtype_of(self.dtype), torch.float64), strict=True):
            inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in drawn.items()}
            results.append(self._by_request(layer, ctx, inputs))
        pairs = zip(*results, strict=True)
        return Expected(tuple(Expectation(f"output {i}", own, truth) for i, (own, truth) in enumerate(pairs)))

    def _by_request(self, layer: PluggableLayer, ctx: Context, inputs: Inputs) -> Sequence[torch.Tensor]:
        """The results of a reference: each request's by itself, all of its tokens in one step, without drafts."""
        if not self.pieces:
            copies = {name: x.clone() for name, x in inputs.items()}
            return sequence(self.kind.forward(layer, copies, StepMemory(ctx, _HOST, ()).steps))
        rows = rows_of(self.pieces)
        found = [
            sequence(
                self.kind.forward(
                    layer,
                    {name: x[own] for name, x in inputs.items()},
                    StepMemory(ctx, _HOST, [[Piece(len(own), len(own))]]).steps,
                )
            )
            for own in rows
        ]
        whole = [torch.empty(self.tokens, *y.shape[1:], dtype=y.dtype) for y in found[0]]
        for i, own in enumerate(rows):
            skipped = num_found(self.pieces, i)
            for x, y in zip(whole, found[i], strict=True):
                x[own[skipped:]] = y[skipped:]
        kept = torch.tensor(kept_rows(self.pieces))
        return [x[kept] for x in whole]

    def num_rows(self, call: Call) -> int:
        """Tokens, where they do not attend to one another."""
        return 0 if self.pieces else self.tokens

    def not_recorded(self) -> str | None:
        """Layers are recorded with the steps that they make up, unless they are steps of attention: these plan."""
        if self.pieces:
            return "it plans steps of its own in this trial"
        if not self.subject.capturable:
            return "the target declares capturable = False"
        self.layer  # noqa: B018  # constructing it asks for what is inside it
        ctx = self.context
        parts = [entry.offer for plan in ctx.selector.plans for entry in plan.entries]
        fixed = [offer for offer in parts if not getattr(ctx.load(offer), "capturable", True)]
        return f"{fixed[0].contribution} is inside it, which cannot be recorded" if fixed else None

    def far_inputs(self, call: Call) -> Sequence[str]:
        """None: see the generator."""
        return ()


def declared(root: PluggableLayer) -> dict[str, WeightSlot]:
    """The weight slots of a layer and of the layers inside it, by full path, such as ``mlp.gate_up.weight``."""
    found = {}
    for path, layer in walk(root):
        for name, slot in layer.declare().items():
            found[f"{path}.{name}" if path else name] = slot
    return found


def _load(
    root: PluggableLayer, weights: Mapping[str, torch.Tensor], device: torch.device, *, wide: bool = False
) -> None:
    """Fill the slots; ``wide`` makes float64 of what stays float32 whatever the model's dtype: truth computes in it."""
    for path, layer in walk(root):
        for name, slot in layer.declare().items():
            dtype = dtype_of("float64" if wide and slot.dtype == "float32" else slot.dtype)
            layer.weights[name] = weights[f"{path}.{name}" if path else name].to(device, dtype, copy=True)
        layer.prepare()


# Checks that only layers have.


def slots(probe: LayerProbe) -> Finding:
    """``slots``: the replacement declares the weights of the default, with their shapes and parts, and no others."""
    wanted, got = declared(probe.default[0]), declared(probe.layer)
    missing, extra = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
    if missing:
        return Finding.failed(
            "slots", missing[0], f"no slot for it: checkpoints would not load ({len(missing)} in all)"
        )
    if extra:
        return Finding.failed("slots", extra[0], f"no checkpoint holds it ({len(extra)} in all)")
    for name, slot in wanted.items():
        if (slot.shape, slot.parts) != (got[name].shape, got[name].parts):
            message = f"shape {list(got[name].shape)}, parts {got[name].parts}; the default has {list(slot.shape)}, "
            return Finding.failed("slots", name, f"{message}{slot.parts}")
    return Finding()


def lifecycle(probe: LayerProbe) -> Finding:
    """``lifecycle``: released, the layer holds no weights; loaded and bound again, it gives the same results."""
    call = probe.call(seed=4)
    before = run(call)
    for _, layer in walk(probe.layer):
        layer.release()
    held = [f"{path}.{name}".lstrip(".") for path, layer in walk(probe.layer) for name in layer.weights]
    if held:
        return Finding.failed("lifecycle", held[0], f"is held after release ({len(held)} in all)")
    probe.load()
    for _, layer in walk(probe.layer):
        layer.bind()
    after = run(probe.call(seed=4))
    if not (same_bits(before, after) if probe.subject.deterministic else len(before) == len(after)):
        return Finding.failed("lifecycle", "outputs", "they differ after release, load, prepare and bind")
    return Finding()


def batch_invariant(probe: LayerProbe, seed: int) -> Finding:
    """``batch-invariant``: tokens of one request by themselves have the bits that they have in the batch."""
    kind = probe.kind
    alike = LayerProbe(probe.subject, kind, probe.dtype, probe.variation, probe.tokens, batch_invariant=True)
    layer, device = alike.loaded, probe.subject.site.device
    drawn = kind.draw(probe.args, probe.tokens, torch.Generator().manual_seed(seed))
    drawn = {n: (x.to(dtype_of(probe.dtype)) if x.is_floating_point() else x).to(device) for n, x in drawn.items()}

    def results(index: torch.Tensor, pieces: Sequence[Sequence[Piece]]) -> list[torch.Tensor]:
        memory = StepMemory(alike.context, device, pieces)
        with torch.inference_mode():
            made = kind.forward(layer, {name: x[index.to(device)] for name, x in drawn.items()}, memory.steps)
            return [y.clone() for y in sequence(made)]

    whole = results(torch.arange(probe.tokens), kind.pieces)
    for index, pieces in _parts(kind, probe.tokens):
        if not same_bits(results(index, pieces), [y[index.to(device)] for y in whole]):
            return Finding.failed("batch-variant", "outputs", f"tokens {index.tolist()[:8]} by themselves differ")
    return Finding()


def _parts(kind: LayerKind, tokens: int) -> Iterator[tuple[torch.Tensor, Pieces]]:
    """Tokens that may stand by themselves: any, or where they attend to one another, those of one request."""
    if not kind.pieces:
        yield from ((torch.tensor([i]), ()) for i in {0, tokens // 2, tokens - 1})
        yield torch.arange(0, tokens, 2), ()
        return
    for i, rows in enumerate(rows_of(kind.pieces)):
        beginning = num_found(kind.pieces, i)
        own = [(step[i],) for step in kind.pieces if step[i].query]
        yield torch.tensor(rows), [(Piece(beginning, beginning),), *own] if beginning else own
