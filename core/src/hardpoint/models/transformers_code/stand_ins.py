"""Modules that take the place of Transformers' own, and pass their input to our layers.

A model's code calls them as it calls what they replace: x is [1, T, n], or [T, n] within mixtures of experts. On the
meta device, before there are layers, they return tensors of the right shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.layers import MLP, Embedding, Experts, Linear, LMHead, Norm
from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.sharding import Style
from hardpoint_plugin_api import CheckpointError, RankGroup, ShardPlan


class _StandIn(nn.Module):
    """``path`` is that of the module it replaces. ``layer`` is constructed after the run on the meta device."""

    layer: Any

    def __init__(self, path: str, current: Current) -> None:
        super().__init__()
        self.path, self.current = path, current
        self.layer = None

    def like(self, weight: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype of ``weight``, for code that asks for these or for its device; no memory."""
        if self.current.probe is not None:
            return weight
        return torch.empty((), dtype=weight.dtype, device=self.current.step.positions.device).expand(weight.shape)


class LinearStandIn(_StandIn):
    """A linear layer, or a part of one that several share: the first of them to be called multiplies for all.

    ``bias`` says whether it has one. ``transposed``: its weight is stored [in, out].
    """

    def __init__(self, path: str, current: Current, source: nn.Module, style: Style, group: RankGroup) -> None:
        super().__init__(path, current)
        self.transposed = not isinstance(source, nn.Linear)
        self.source_weight, self.bias = source.weight.data, source.bias is not None
        shape = tuple(self.source_weight.shape)  # type: ignore[arg-type]
        self.out_features, self.in_features = shape[::-1] if self.transposed else shape
        self.style, self._group = style, group
        self.shard: ShardPlan | None = None
        self.shared: tuple[SharedProduct, str] | None = None

    @property
    def weight(self) -> torch.Tensor:
        """See ``like``."""
        weight: torch.Tensor = self.source_weight  # type: ignore[assignment]
        return self.like(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], as on this rank."""
        if self.current.probe is not None:
            self.current.probe.read.append((self, x))
            divided = self.style == "colwise" and self.shard is not None
            return x.new_empty(*x.shape[:-1], self.shard.size if divided and self.shard else self.out_features)
        if self.shared is not None:
            product, part = self.shared
            return product.part(x, part, self.current)
        if self.style == "rowwise_split_input" and self.shard is not None:
            x = x.narrow(-1, self._group.rank * self.shard.size, self.shard.size)
        rows = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = self.layer(rows, self.current.step)
        if self.shard is not None and self.style.startswith("rowwise"):
            y = self._group.all_reduce(y)
        if self.shard is not None and self.style == "colwise_gather_output":
            y = self._group.all_gather_columns(y)
        return y.view(*x.shape[:-1], y.shape[-1])


class SharedProduct:
    """A linear layer whose parts a model's code asks for one after the other, each with the same tensor."""

    def __init__(self, layer: Linear) -> None:
        self._layer, sizes, start = layer, layer.args.own_parts, 0
        self._places: dict[str, slice] = {}
        for name, rows in sizes:
            self._places[name] = slice(start, start + rows)
            start += rows

    def part(self, x: torch.Tensor, name: str, current: Current) -> torch.Tensor:
        """The part ``name`` of the product with x [..., in]. It is kept until every part was asked for."""
        product, left = current.products.pop(self, (None, len(self._places)))
        if product is None:
            product = self._layer(x.reshape(-1, x.shape[-1]), current.step)
        if left > 1:
            current.products[self] = product, left - 1
        y = product[:, self._places[name]]
        return y.view(*x.shape[:-1], y.shape[-1])


class NormStandIn(_StandIn):
    """An RMS norm."""

    layer: Norm | None

    def __init__(self, path: str, current: Current, weight: torch.Tensor) -> None:
        super().__init__(path, current)
        self.source_weight = weight.data

    @property
    def weight(self) -> torch.Tensor:
        """See ``like``."""
        return self.like(self.source_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., n]."""
        if self.current.probe is not None:
            return torch.empty_like(x)
        assert self.layer is not None
        if (residual := self.current.take_residual(x)) is not None:
            total: torch.Tensor = self.layer(x[0], residual)[0]
            return total[None]
        y: torch.Tensor = self.layer(x)[0]
        return y


class MLPStandIn(_StandIn):
    """A feed-forward."""

    layer: MLP | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        if self.current.probe is not None:
            return torch.empty_like(x)
        assert self.layer is not None
        y: torch.Tensor = self.layer(x.reshape(-1, x.shape[-1]), self.current.step)
        return y.view(x.shape)


class ExpertsStandIn(_StandIn):
    """The routed experts of a mixture, behind the model's own router."""

    layer: Experts | None

    def __init__(self, path: str, current: Current, group: RankGroup) -> None:
        super().__init__(path, current)
        self._group = group

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], top_k_index and top_k_weights [T, k] -> [T, hidden]."""
        if self.current.probe is not None:
            self.current.probe.top_k[self] = top_k_index.shape[-1]
            return torch.empty_like(x)
        assert self.layer is not None
        k, rows = top_k_index.shape[-1], x.reshape(-1, x.shape[-1])
        ids, weights = top_k_index.reshape(-1, k).int(), top_k_weights.reshape(-1, k).float()  # as they are, if ours
        y: torch.Tensor = self.layer(rows, ids, weights, self.current.step)
        return self._group.all_reduce(y).view(x.shape) if self._group.size > 1 else y.view(x.shape)

    def check(self) -> None:
        """Raise CheckpointError where the experts' ranks do not hold the same tokens."""
        assert self.layer is not None
        if not self.layer.replicated:
            raise CheckpointError(
                f"{self.path}: a mixture in Transformers' code needs an all2all that is replicated; use "
                "--use all2all=local, or leave --enable-expert-parallel out"
            )


def keep_experts(module: Any, current: Current) -> None:
    """Have experts that run by their own code pass in the run on the meta device, where that fails."""
    own = module.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return torch.empty_like(x) if current.probe is not None else own(x, *args, **kwargs)

    module.forward = forward


class EmbeddingStandIn(_StandIn):
    """A token embedding; rows are multiplied by a number of the model's dtype, where it has one."""

    layer: Embedding | None

    def __init__(self, path: str, current: Current, source: nn.Embedding, multiplier: float) -> None:
        super().__init__(path, current)
        self.source_weight, self.num_embeddings = source.weight.data, source.num_embeddings
        self.embedding_dim, self.padding_idx = source.embedding_dim, source.padding_idx
        self._multiplier = float(torch.tensor(multiplier, dtype=source.weight.dtype))

    @property
    def weight(self) -> torch.Tensor:
        """See ``like``."""
        return self.like(self.source_weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, T] -> [1, T, hidden]."""
        if self.current.probe is not None:
            return self.source_weight.new_empty(*ids.shape, self.embedding_dim)
        assert self.layer is not None
        x: torch.Tensor = self.layer(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)
        return x if self._multiplier == 1.0 else x * self._multiplier


class HeadStandIn(_StandIn):
    """The output head. ``bias`` [vocab] is the model's own tensor."""

    layer: LMHead | None

    def __init__(self, path: str, current: Current, source: nn.Linear) -> None:
        super().__init__(path, current)
        self.source_weight, self.bias = source.weight.data, source.bias
        self.out_features, self.in_features = source.weight.shape

    @property
    def weight(self) -> torch.Tensor:
        """See ``like``."""
        return self.like(self.source_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocab]."""
        if self.current.probe is not None:
            return x.new_empty(*x.shape[:-1], self.out_features)
        assert self.layer is not None
        y: torch.Tensor = self.layer(x.reshape(-1, x.shape[-1]))
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


class Given(nn.Module):
    """Takes the place of the body in a model whose head runs alone: returns what the body would have returned.

    ``decoder``: itself, for heads that call that part of a body alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    @property
    def decoder(self) -> Given:
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``output``, whatever the arguments."""
        return self.output
