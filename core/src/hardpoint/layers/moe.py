"""The feed-forward of a block that is a mixture of experts: router, experts, and what every token goes through.

Axes: T tokens, H hidden, E experts, K experts per token. All ranks of a replica have the same tokens. The output of a
rank's experts, or of its slices of experts, is a partial sum. An all2all that is not ``replicated`` wants tokens of
each rank's own: there, each routes its share, the all2all brings them to their experts, and ranks of the replica gather
the results. Replicas that share experts need such an all2all. Their steps may be padded to the largest of them; padding
goes to no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.experts.balance import place_experts
from hardpoint.experts.placement import Placement
from hardpoint.experts.prepare_finalize import AnyExpertsKernel, PrepareFinalize
from hardpoint.layers.base import PluggableLayer, checked_weights
from hardpoint.layers.linear import Linear
from hardpoint.layers.mlp import MLP
from hardpoint.layers.routed_experts import RoutedExperts
from hardpoint.ops.activation import activation
from hardpoint.ops.route_topk import route_topk, settings
from hardpoint.parallel.shards import even_shard
from hardpoint.plugin_host.blame import blame, construct
from hardpoint.quantization.merging import collapse_parts
from hardpoint_plugin_api import (
    NULL_PAGE,
    All2All,
    All2AllWorkload,
    BatchedExpertsKernel,
    ExpertsKernel,
    ExpertsWorkload,
    Feature,
    ForwardStep,
    GroupMember,
    LinearArgs,
    MLPArgs,
    MoEArgs,
    RankGroup,
    ShardPlan,
    ShardSlice,
    WeightSlot,
    weight_slots,
)

_WORKSPACE = "experts.workspace"
_MANY_TOKENS = 128
"""With fewer in a step, padding goes to experts: two more kernels on each layer may cost as much. An estimate, see
docs/distribution.md."""


class MoE(PluggableLayer, name="moe"):
    """Slot: correction_bias float32 [E], where the router has one."""

    def __init__(self, ctx: Context, args: MoEArgs) -> None:
        super().__init__(ctx)
        self.args, hidden = args, args.hidden_size
        self._sharing, self._tp, self._returns_partial_sums = sharing_group(ctx), ctx.parallel.tp, False
        self._slices, self._block_size, self._users = slicing_group(ctx), ctx.block_size, ctx.cache_users.users
        self.router = Linear(
            ctx.child("router"),
            LinearArgs(hidden, (("experts", args.router.num_experts),), args.router.linear_bias, kind="router"),
        )
        self._route = route_topk.bind(ctx, routing=args.router.routing)
        self._routing = settings(args.router)
        self._records = [RoutedExperts(ctx, args.router.top_k)] if ctx.config.enable_return_routed_experts else []
        one_by_one = replace(args, router=replace(args.router, top_k=1))
        self.experts = Experts(ctx.child("experts"), one_by_one if args.weights_on_input else args)
        self.shared = self.shared_gate = None
        if args.shared_size:
            shared = MLPArgs(hidden, args.shared_size, args.activation, args.gated)
            self.shared = MLP(ctx.child("shared"), shared)
        ours = type(self).forward is MoE.forward  # another may want the shared expert's result
        self._sums = ours and self.experts.replicated and (self.shared is None or self.shared.return_partial_sums())
        if args.shared_gate:
            self.shared_gate = Linear(ctx.child("shared_gate"), LinearArgs(hidden, (("gate", 1),), kind="router"))
            self._sigmoid = activation.bind(ctx, activation="sigmoid")

    def declare(self) -> dict[str, WeightSlot]:
        if not self.args.router.bias:
            return {}
        return {"correction_bias": WeightSlot((self.args.router.num_experts,), "float32")}

    def return_partial_sums(self) -> bool:
        self._returns_partial_sums = self._sums
        return self._sums

    def forward(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        y = self._routed(x, step, (x.shape[0],)) if self.experts.replicated else self._gathered(x, step)
        if self.experts.replicated and not self._sums:
            y = self._tp.all_reduce(y)
        if self.shared is not None:
            shared: torch.Tensor = self.shared(x, step)
            if self.shared_gate is not None:
                shared = shared * self._sigmoid(self.shared_gate(x, step), activation="sigmoid")
            y = y + shared
        return self._tp.all_reduce(y) if self._sums and not self._returns_partial_sums else y

    def _gathered(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """The output of all ranks' experts for x [T, H], of which each rank routes a share."""
        shares = _shares(x.shape[0], self._sharing.size)
        start = sum(shares[: self._sharing.rank])
        own = slice(start, start + shares[self._sharing.rank])
        padding = self._padding(step, own) if self.experts.serves_replicas and x.shape[0] >= _MANY_TOKENS else None
        y = self._routed(x[own], step, shares, padding)
        if y.shape[0]:  # the same on all ranks that have slices of one expert
            y = self._slices.all_reduce(y)
        return self._sharing.all_gather(y, shares)

    def _routed(
        self, x: torch.Tensor, step: ForwardStep, shares: Sequence[int], padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run this rank's experts on x [t, H], its share of the tokens of ``step``; ``shares`` are the replica's.

        ``padding``, bool [t]: tokens that go to no expert.
        """
        ids, weights = self._route(self.router(x, step), self.weights.get("correction_bias"), **self._routing)
        for record in self._records:
            record.store(self._sharing.all_gather(ids, shares) if len(shares) > 1 else ids, step)
        if padding is not None:
            ids = ids.masked_fill(padding.unsqueeze(1), -1)
        if self.args.weights_on_input:
            return self._one_by_one(x, ids, weights, step)
        y: torch.Tensor = self.experts(x, ids, weights, step)
        return y

    def _padding(self, step: ForwardStep, own: slice) -> torch.Tensor | None:
        """The ``own`` tokens of ``step`` that are mere padding, bool [t]: those that are stored to the null page.

        None where no cache of this rank's layers is of tokens: of a state, a request has the page of its newest block
        alone, and its tokens of earlier blocks have the null page, too.
        """
        number = next((n for n, user in enumerate(self._users) if not user.spec.retention.per_sequence), None)
        if number is None or not step.metadata:
            return None
        return step.metadata[number].batch.slot_mapping[own] < (NULL_PAGE + 1) * self._block_size

    def _one_by_one(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Each of a token's experts reads an input of its own: the token multiplied by the expert's weight."""
        columns = zip(ids.split(1, 1), weights.split(1, 1), strict=True)
        first, *others = (
            self.experts((x * weight).to(x.dtype), expert.contiguous(), torch.ones_like(weight), step)
            for expert, weight in columns
        )
        y: torch.Tensor = first
        for each in others:
            y = y + each
        return y


class Experts(PluggableLayer):
    """The routed experts that are on this rank, behind the kernels and the all2all that the selector chose.

    Slots: ``w13.SLOT`` and ``w2.SLOT``, see ``hardpoint_plugin_api.experts``, stacked by the experts' numbers; ``bias``
    among them where experts have biases.
    """

    def __init__(self, ctx: Context, args: MoEArgs) -> None:
        super().__init__(ctx)
        self.args = args
        self.dtype, self._resources, self._has_bias = dtype_name(ctx.dtype), ctx.resources, args.bias
        self._total, ep = args.router.num_experts, ctx.parallel.ep
        self._num_ranks, self._num_replicas = ep.size, ep.size // sharing_group(ctx).size
        placement = Placement.even(self._total, ep.size, ctx.config.num_redundant_experts)
        count, self._rank = placement.num_slots, ep.rank
        slices = slicing_group(ctx)
        self._slice = slices.rank
        width = args.intermediate_size
        shard = even_shard(width, slices, "width of experts")
        rows = (("gate", width), ("up", width)) if args.gated else (("up", width),)
        matrices = {
            "w13": LinearArgs(args.hidden_size, rows, row_shards=(shard,) * len(rows) if shard else ()),
            "w2": LinearArgs(width, (("down", args.hidden_size),), column_shard=shard),
        }
        held = ((ShardSlice(numbers[0], 0, count),) for numbers in placement.ranks)  # neighbours, see Placement.even
        experts = ShardPlan(self._total, count, tuple(held), ep.rank)
        schemes = ctx.quantization.experts(ctx.path, matrices, experts, self.dtype)
        self._matrices = {name: (matrix, schemes[name]) for name, matrix in matrices.items()}
        pair, w2_pair = schemes["w13"].pair, schemes["w2"].pair
        features = {Feature.EXPERT_BIAS: args.bias, Feature.W2_SPEC: w2_pair != pair}
        parallel = {(False, False): "none", (True, False): "ep", (False, True): "tp", (True, True): "tp+ep"}
        exchange = All2AllWorkload(
            dtype=self.dtype,
            parallel=parallel[ep.size > 1, slices.size > 1],
            ranks=ep.size,
            num_experts=ep.size * count,
            top_k=args.router.top_k,
            hidden_size=args.hidden_size,
            features=_features(ctx) if ep.size > 1 else frozenset(),
        )
        self._all2all = _all2all(ctx, exchange)
        self.serves_replicas = self._num_replicas > 1
        self.replicated = ep.size == 1 or self._all2all.replicated
        self._placed = place_experts(ctx, placement, lambda: self.weights, partial=not self.replicated)
        workload = ExpertsWorkload(
            dtype=self.dtype,
            spec=pair,
            activation=args.experts_activation,
            routing=args.router.routing,
            parallel=exchange.parallel,
            format=self._all2all.format,
            num_experts=count,
            top_k=args.router.top_k,
            hidden_size=args.hidden_size,
            intermediate_size=shard.size if shard else width,
            w2_spec=w2_pair if features[Feature.W2_SPEC] else None,
            features=frozenset(feature for feature, is_used in features.items() if is_used),
        )
        plan = ctx.select(workload)
        standard = workload.format == "standard"
        kind: Callable[..., AnyExpertsKernel] = ExpertsKernel if standard else BatchedExpertsKernel
        self.kernels = [construct(e.offer, ctx.load(e.offer), kind, ctx, plan.workload) for e in plan.entries]
        self._offer = plan.entries[0].offer
        for entry, kernel in zip(plan.entries, self.kernels, strict=True):
            ctx.kernel_calls.attach(entry.offer, kernel)
        self._limits = [entry.range.max for entry in plan.entries]
        self._around = [PrepareFinalize(ctx, self._all2all, kernel) for kernel in self.kernels]
        self._most_tokens = ctx.config.max_num_batched_tokens
        most = self._all2all.most_rows(max(self._of_ranks([self._most_tokens] * self._num_replicas)))
        self._scratch = []
        for entry, kernel in zip(plan.entries, self.kernels, strict=True):
            with blame(entry.offer):
                self._scratch.append(kernel.workspace_bytes(most))
        ctx.resources.declare(_WORKSPACE, max(self._scratch))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The experts in this rank's slots."""
        return self._placed.placement.ranks[self._rank]

    def release(self) -> None:
        super().release()
        self._placed.reset()

    def declare(self) -> dict[str, WeightSlot]:
        slots = {}
        stack_of = self._total if len(self.numbers) < self._total else 0
        for matrix, (args, scheme) in self._matrices.items():
            for name, slot in weight_slots(scheme, args.own_parts, args.own_in_features, self.numbers).items():
                slots[f"{matrix}.{name}"] = replace(slot, stack_of=stack_of)
            if not scheme.stored:  # what a scheme stores is cut as its tensors say, before it is read
                columns = (args.column_shard,) if args.column_shard else ()
                weight = slots[f"{matrix}.weight"]
                axis = 2 if columns else 1
                slots[f"{matrix}.weight"] = replace(weight, shard_axis=axis, shards=columns or args.row_shards)
            if self._has_bias:
                parts = args.own_parts if len(args.own_parts) > 1 else ()
                shape = (len(self.numbers), sum(rows for _, rows in args.own_parts))
                slots[f"{matrix}.bias"] = WeightSlot(
                    shape, self.dtype, 1, parts, self.numbers, args.row_shards, stack_of
                )
        return slots

    def prepare(self) -> None:
        weights = self.weights
        for matrix in self._matrices:
            weights = collapse_parts(weights, self.path, f"{matrix}.", stacked=True)
        if self._has_bias and self._slice:
            weights["w2.bias"].zero_()  # each slice makes a part of the sum, to which the first one's adds the bias
        with blame(self._offer):
            packed = self.kernels[0].prepack(weights)
        self.weights = checked_weights(self._offer, packed)
        self._placed.check()

    def allocate(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return x.new_empty(x.shape)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """x [t, H], ids int32 and weights float32 [t, K] -> [t, H], for this rank's t of the step's tokens.

        Kernels are chosen by the number of the step's tokens on all replicas, which ranks have in common. Where each
        expert is divided, the sum over ranks is still to be taken.
        """
        replicas, ids = step.replica_tokens or [step.num_tokens] * self._num_replicas, self._placed.physical(ids)
        place = next(i for i, most in enumerate(self._limits) if most is None or sum(replicas) <= most)
        workspace = self._resources.get(_WORKSPACE)[: self._scratch[place]]
        run, w = self._around[place].run, self.weights
        parts, shares = -(-max(replicas) // self._most_tokens), self._of_ranks(replicas)
        if parts <= 1:
            self._all2all.expect(shares)
            return run(x, ids, weights, w, workspace)
        # Padded to more than there is scratch memory for. There are as many parts on every rank.
        pieces = zip(x.tensor_split(parts), ids.tensor_split(parts), weights.tensor_split(parts), strict=True)
        done = []
        for number, piece in enumerate(pieces):
            self._all2all.expect([share // parts + (number < share % parts) for share in shares])
            done.append(run(*piece, w, workspace))
        return torch.cat(done)

    def _of_ranks(self, replicas: Sequence[int]) -> Sequence[int]:
        """How many of a step's tokens each rank dispatches; ``replicas`` says how many each replica has."""
        if self.replicated:
            return [*replicas] * self._num_ranks
        ranks = self._num_ranks // self._num_replicas
        return [share for tokens in replicas for share in _shares(tokens, ranks)]


def sharing_group(ctx: Context) -> RankGroup:
    """The ranks that share the tokens of a replica among them, to route a part each."""
    parallel = ctx.parallel
    return parallel.tp if parallel.ep.size > parallel.tp.size else parallel.ep


def _features(ctx: Context) -> frozenset[Feature]:
    several = ctx.parallel.ep.size > ctx.parallel.tp.size
    return ctx.group_features | ({Feature.SEVERAL_REPLICAS} if several else frozenset())


def slicing_group(ctx: Context) -> RankGroup:
    """The ranks that have slices of the same experts."""
    return ctx.parallel.expert_tp if ctx.parallel.ep.size > 1 else ctx.parallel.tp


def _all2all(ctx: Context, workload: All2AllWorkload) -> All2All:
    """The one that all layers of this shape share. It joins the group of expert ranks where it is a GroupMember."""
    plan = ctx.select(workload)

    def make() -> All2All:
        made = construct(plan.offer, ctx.load(plan.offer), All2All, ctx, plan.workload)
        if isinstance(made, GroupMember):
            ctx.adopt(plan.offer, made, ctx.parallel.ep)
        return made

    return ctx.shared(("all2all", plan.workload), make)


def _shares(tokens: int, ranks: int) -> Sequence[int]:
    """How many of a step's tokens each rank routes: as equal as can be."""
    bounds = [tokens * rank // ranks for rank in range(ranks + 1)]
    return [end - start for start, end in pairwise(bounds)]
