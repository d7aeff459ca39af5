"""Putting stand-ins into a model of Transformers', and constructing the layers behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hardpoint.context import Context
from hardpoint.layers import MLP, Embedding, Experts, Linear, LMHead, Norm
from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.forward_only import call_forward_only
from hardpoint.models.transformers_code.matching import (
    GateMatch,
    MLPMatch,
    NormMatch,
    embedding_multiplier,
    is_linear,
    match_gate,
    match_mlp,
    match_norm,
)
from hardpoint.models.transformers_code.own_attention import replace_own_attention
from hardpoint.models.transformers_code.probe import CannotRunError, Probe
from hardpoint.models.transformers_code.report import Report
from hardpoint.models.transformers_code.rotary import Rotation, rotations
from hardpoint.models.transformers_code.router import BIAS, Router, RouterMatch, RouterStandIn, match_router
from hardpoint.models.transformers_code.sharding import TensorPlan
from hardpoint.models.transformers_code.stand_ins import (
    EmbeddingStandIn,
    ExpertsStandIn,
    HeadStandIn,
    LinearStandIn,
    MLPStandIn,
    NormStandIn,
    SharedProduct,
    keep_experts,
)
from hardpoint.models.transformers_code.weights import ExpertsPlace, Names
from hardpoint_plugin_api import EmbeddingArgs, LinearArgs, MLPArgs, MoEArgs, NormArgs, RouterArgs

LAYER = "layer"
"""The name of the layer within a stand-in."""


@dataclass
class Surgery:
    """One model's stand-ins, by path. ``names`` are the model's own names of tensors, with their slots."""

    current: Current
    plan: TensorPlan
    report: Report
    linears: list[LinearStandIn] = field(default_factory=list)
    norms: list[tuple[NormStandIn, NormMatch]] = field(default_factory=list)
    mlps: list[tuple[MLPStandIn, MLPMatch, nn.Module]] = field(default_factory=list)
    experts: list[tuple[ExpertsStandIn, nn.Module]] = field(default_factory=list)
    routers: list[RouterStandIn] = field(default_factory=list)
    rotations: list[Rotation] = field(default_factory=list)
    embedding: EmbeddingStandIn | None = None
    head: HeadStandIn | None = None
    names: Names = field(default_factory=dict)
    stacks: dict[str, ExpertsPlace] = field(default_factory=dict)
    _within: set[nn.Module] = field(default_factory=set)
    """Modules that were replaced, and those within them."""
    _norm_kinds: dict[tuple[Any, ...], NormMatch | None] = field(default_factory=dict)
    _router_kinds: dict[tuple[Any, ...], RouterMatch | None] = field(default_factory=dict)
    _mlp_kinds: dict[tuple[Any, ...], MLPMatch | None] = field(default_factory=dict)

    def replace(self, model: Any) -> None:
        """Put stand-ins into ``model`` wherever a layer of ours computes the same."""
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        for module in model.modules():
            replace_own_attention(module)
        self.rotations = rotations(model, self.current)
        call_forward_only(model)
        for parent, name, path, module in list(_below(model)):
            if parent not in self._within and (stand_in := self._stand_in(module, path, inputs, outputs)) is not None:
                setattr(parent, name, stand_in)
                self._within |= set(module.modules())
                self.report.replaced[type(stand_in).__name__.removesuffix("StandIn").lower()] += 1

    def _stand_in(self, module: nn.Module, path: str, inputs: nn.Module, outputs: nn.Module | None) -> nn.Module | None:
        current = self.current
        if module is outputs and isinstance(module, nn.Linear):
            self.head = HeadStandIn(path, current, module)
            return self.head
        if module is inputs and (factor := embedding_multiplier(module)) is not None:
            assert isinstance(module, nn.Embedding)
            self.embedding = EmbeddingStandIn(path, current, module, factor)
            return self.embedding
        if (norm := self._norm(module)) is not None:
            made = NormStandIn(path, current, module.weight)  # type: ignore[arg-type]  # match_norm saw that it has one
            self.norms.append((made, norm))
            return made
        if (mlp := self._mlp(module)) is not None:
            self.mlps.append((MLPStandIn(path, current), mlp, module))
            return self.mlps[-1][0]
        if hasattr(module, "gate_up_proj") and hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            return self._experts(module, path)
        if (router := self._router(module)) is not None:
            self.routers.append(RouterStandIn(path, current, router))
            return self.routers[-1]
        if is_linear(module) or type(module).__name__ == "Conv1D":
            return self._linear(module, path)
        if any(True for _ in module.parameters(recurse=False)):
            self.report.keep(type(module).__name__, path, "no layer of Hardpoint's computes the same")
        return None

    def _linear(self, module: nn.Module, path: str) -> LinearStandIn:
        style = self.plan.linear(path)
        made = LinearStandIn(path, self.current, module, style, self.plan.group)
        full = made.out_features if style.startswith("colwise") else made.in_features
        find = self.plan.rows if style.startswith("colwise") else self.plan.columns
        made.shard = find(full, style, path)
        self.linears.append(made)
        return made

    def _norm(self, module: nn.Module) -> NormMatch | None:
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 1:
            return None
        numbers = tuple(x for x in vars(module).values() if isinstance(x, float | int))
        key = (type(module), weight.shape, numbers)
        if key not in self._norm_kinds:
            self._norm_kinds[key] = match_norm(module)
        return self._norm_kinds[key]

    def _router(self, module: nn.Module) -> RouterMatch | None:
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2 or not hasattr(module, "top_k"):
            return None
        numbers = tuple((n, x) for n, x in vars(module).items() if isinstance(x, float | int | str))
        key = (type(module), weight.shape, numbers)
        if key not in self._router_kinds:
            self._router_kinds[key] = match_router(module)
        return self._router_kinds[key]

    def _mlp(self, module: nn.Module) -> MLPMatch | None:
        children = dict(module.named_children())
        key = (type(module), tuple((n, type(c), str(c), getattr(c, "bias", None) is None) for n, c in children.items()))
        if key not in self._mlp_kinds:
            self._mlp_kinds[key] = match_mlp(module) if 2 <= len(children) <= 5 else None
        found = self._mlp_kinds[key]
        used = [name for name in (found.gate, found.up, found.down) if name is not None] if found else []
        return found if len({getattr(children[name], "bias", None) is None for name in used}) == 1 else None

    def _experts(self, module: nn.Module, path: str) -> nn.Module | None:
        found, gate = {name for name, _ in module.named_parameters()}, _gate(module)
        wanted = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set())
        reason = None
        if found != wanted:
            reason = f"their tensors are {', '.join(sorted(found))}"
        elif getattr(module, "has_post_expert_norm", False):
            reason = "they are normed"
        elif gate is None:
            reason = "their gate is no known activation"
        if reason is not None:
            self.report.keep(type(module).__name__, path, reason)
            keep_experts(module, self.current)
            return None
        made = ExpertsStandIn(path, self.current, self.plan.group)
        self.experts.append((made, module))
        return made

    def name_all(self, probe: Probe, root: Mapping[str, str]) -> list[list[LinearStandIn]]:
        """Fill ``names``; returns the linear layers that share a product, each group's first first.

        ``root``: the place in our model of each of the model's top modules.
        """
        groups = self._groups(probe)
        for group in groups:
            first = _address(root, group[0].path)
            for one in group:
                part = f"[{_last(one.path)}]" if len(group) > 1 else "[transposed]" if one.transposed else ""
                self.names[f"{one.path}.weight"] = f"{first}.{LAYER}.weight{part}"
                if one.bias:
                    bias = part if len(group) > 1 else ""
                    self.names[f"{one.path}.bias"] = f"{first}.{LAYER}.bias{bias}"
        for norm, match in self.norms:
            plus = "[plus_one]" if match.plus_one else ""
            self.names[f"{norm.path}.weight"] = f"{_address(root, norm.path)}.{LAYER}.weight{plus}"
        for router in self.routers:
            at = f"{_address(root, router.path)}.{LAYER}"
            self.names[f"{router.path}.weight"] = f"{at}.linear.weight"
            if router.match.args.linear_bias:
                self.names[f"{router.path}.bias"] = f"{at}.linear.bias"
            if router.match.args.bias:
                self.names[f"{router.path}.{BIAS}"] = f"{at}.correction_bias"
        for mlp, found, module in self.mlps:
            at = f"{_address(root, mlp.path)}.{LAYER}"
            up = "[up]" if found.gate is not None else ""
            places = {found.up: ("gate_up", up), found.down: ("down", "")}
            places |= {found.gate: ("gate_up", "[gate]")} if found.gate is not None else {}
            for name, (layer, part) in places.items():
                for tensor, _ in module.get_submodule(str(name)).named_parameters():
                    self.names[f"{mlp.path}.{name}.{tensor}"] = f"{at}.{layer}.{tensor}{part}"
        for experts, module in self.experts:
            at = f"{_address(root, experts.path)}.{LAYER}"
            interleaved = ["interleaved"] if not module.is_concatenated else []
            transposed = ["transposed"] if module.is_transposed else []
            for name, slot, orders in (
                ("gate_up_proj", "w13.weight", interleaved + transposed),
                ("down_proj", "w2.weight", transposed),
                ("gate_up_proj_bias", "w13.bias", interleaved),
                ("down_proj_bias", "w2.bias", []),
            ):
                if name in module._parameters:
                    self.names[f"{experts.path}.{name}"] = f"{at}.{slot}" + (f"[{','.join(orders)}]" if orders else "")
            self.stacks[f"{experts.path}.gate_up_proj"] = ExpertsPlace(f"{at}.w13.weight", ("gate", "up"))
            self.stacks[f"{experts.path}.down_proj"] = ExpertsPlace(f"{at}.w2.weight", ())
        return groups

    def name_ends(self, root: Mapping[str, str], tied: bool) -> None:
        """The names of embedding and head; where they are tied, the head holds the weight."""
        assert self.embedding is not None
        embedding, head = self.embedding, self.head
        at = f"{_address(root, embedding.path)}.{LAYER}.weight"
        if head is not None:
            own = f"{_address(root, head.path)}.{LAYER}.linear.weight"
            at = own if tied else at
            self.names[f"{head.path}.weight"] = None if tied else own
        self.names[f"{embedding.path}.weight"] = at

    def build(
        self, ctx: Context, probe: Probe, groups: list[list[LinearStandIn]], root: Mapping[str, str], tied: bool
    ) -> None:
        """Construct the layers."""

        def at(path: str) -> Context:
            return replace_path(ctx, f"{_address(root, path)}.{LAYER}")

        if self.head is not None:
            args = EmbeddingArgs(self.head.out_features, self.head.in_features, tied)
            self.head.layer = LMHead(at(self.head.path), args)
        if self.embedding is not None:
            args = EmbeddingArgs(self.embedding.num_embeddings, self.embedding.embedding_dim, tied)
            shared = self.head.layer if tied and self.head is not None else None
            self.embedding.layer = Embedding(at(self.embedding.path), args, shared)
        for group in groups:
            self._build_linear(at(group[0].path), group)
        bound = sum(rotation.bind(ctx.child("rotary")) for rotation in self.rotations)
        if bound:
            self.report.replaced["rotary"] = bound
        for norm, match in self.norms:
            norm.layer = Norm(at(norm.path), NormArgs(match.size, match.eps))
        for router in self.routers:
            router.layer = Router(at(router.path), router.match.args, router.match.hidden_size)
        for mlp, found, module in self.mlps:
            down = module.get_submodule(found.down)
            assert isinstance(down, nn.Linear)
            hidden, width = down.weight.shape
            sizes = MLPArgs(hidden, width, found.activation, found.is_gated, down.bias is not None)
            mlp.layer = MLP(at(mlp.path), sizes)
        for experts, module in self.experts:
            self._build_experts(at(experts.path), experts, module, probe)

    def _build_linear(self, ctx: Context, group: list[LinearStandIn]) -> None:
        first = group[0]
        parts = tuple((_last(one.path), one.out_features) for one in group)
        colwise = first.style.startswith("colwise")
        rows = tuple(one.shard for one in group if one.shard is not None) if colwise else ()
        columns = None if colwise else first.shard
        args = LinearArgs(first.in_features, parts, first.bias, row_shards=rows, column_shard=columns)
        first.layer = Linear(ctx, args)
        if len(group) > 1:
            shared = SharedProduct(first.layer)
            for one in group:
                one.shared = (shared, _last(one.path))
            self.report.replaced["merged products"] += 1

    def _build_experts(self, ctx: Context, made: ExpertsStandIn, module: nn.Module, probe: Probe) -> None:
        down: torch.Tensor = module.down_proj  # type: ignore[assignment]
        count, first, second = down.shape
        hidden, width = (second, first) if module.is_transposed else (first, second)
        gate = _gate(module)
        if gate is None or made not in probe.top_k:
            raise CannotRunError(f"{made.path}: experts that its code never calls")
        args = MoEArgs(
            hidden,
            width,
            RouterArgs(count, probe.top_k[made]),
            gate.activation,
            bias=bool(module.has_bias),
            swiglu_alpha=gate.alpha,
            swiglu_limit=gate.limit,
        )
        made.layer = Experts(ctx, args)
        made.check()

    def _groups(self, probe: Probe) -> list[list[LinearStandIn]]:
        """Linear layers of one module that read the same tensor, and may be one product; others are alone."""
        calls: dict[LinearStandIn, list[int]] = {}
        for stand_in, x in probe.read:
            calls.setdefault(stand_in, []).append(id(x))  # type: ignore[arg-type]  # they alone are noted
        groups: dict[tuple[Any, ...], list[LinearStandIn]] = {}
        for one in self.linears:
            inputs = calls.get(one, [])
            mergeable = len(inputs) == 1 and not one.transposed and one.style in ("replicated", "colwise")
            key: tuple[Any, ...] = (one.path,)
            if mergeable:
                key = (one.path.rpartition(".")[0], inputs[0], one.bias, one.style, one.in_features)
            groups.setdefault(key, []).append(one)
        return list(groups.values())


def _gate(module: Any) -> GateMatch | None:
    """The activation of experts of Transformers'."""
    return match_gate(module._apply_gate, not module.is_concatenated)


def replace_path(ctx: Context, path: str) -> Context:
    """The same context at ``path``."""
    for element in path.split("."):
        ctx = ctx.child(element)
    return ctx


def _below(module: nn.Module, path: str = "") -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Every module below ``module``, outer ones first: its parent, its name there, its path, and itself."""
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        yield module, name, full, child
        yield from _below(child, full)


def _address(root: Mapping[str, str], path: str) -> str:
    """The place in our model of the module at ``path`` of Transformers' model."""
    top, dot, rest = path.partition(".")
    return f"{root.get(top, f'head_code.{top}')}{dot}{rest}"


def _last(path: str) -> str:
    return path.rpartition(".")[2]
