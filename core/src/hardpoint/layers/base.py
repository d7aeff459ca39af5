"""``PluggableLayer``: a layer class that a plugin can replace by name, at construction.

A layer is constructed as ``Layer(ctx, args)``. For a class that declares a name (``class Norm(PluggableLayer,
name="norm")``) the metaclass asks the selector, and constructs the winner. A class without a name (a replacement, or a
specialisation in core) is constructed as it is. ``build_layer(ctx, args)`` constructs the layer that its arguments
name.

Life cycle: declare (weight slots), load, prepare (pack, fold, drop originals), bind (functions over final weights);
``release`` drops the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from hardpoint.context import Context
from hardpoint.dtypes import dtype_name
from hardpoint.layers.lora import LinearAdapters
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.blame import blame, misbehaved, of_kind
from hardpoint.plugin_host.record import CORE
from hardpoint_plugin_api import Feature, LayerArgs, LayerWorkload, QuantSpec, UnknownNameError, WeightSlot

_Layer = TypeVar("_Layer")


class _PluggableMeta(type):
    """Constructs the selected replacement in place of a named layer class."""

    pluggable_name: str | None

    def __call__(cls, ctx: Context, args: Any, *rest: Any, **options: Any) -> Any:
        name = cls.__dict__.get("pluggable_name")
        if name is None:
            return super().__call__(ctx, args, *rest, **options)
        return _build(name, ctx, args, *rest, **options)

    def as_it_stands(cls: type[_Layer], *args: Any, **options: Any) -> _Layer:
        """An instance of this very class."""
        made: _Layer = type.__call__(cls, *args, **options)
        return made


class PluggableLayer(nn.Module, metaclass=_PluggableMeta):
    """The base of every layer. ``weights`` holds tensors by slot name: as loaded, later as ``prepare`` leaves them.

    Steps may be replayed as captured graphs, without Python. ``capturable`` False: ``forward`` waits for the device,
    branches on its values, or has side effects; no step of its model is then captured. ``traceable`` True: every launch
    is torch's, an op's or another layer's, so that a graph engine that records only these records through it; otherwise
    such an engine calls the layer again in each replay.

    ``input_spec``: the quantization in which ``forward`` wants its first argument, which is then ``Quantized``, or
    plain. It is set at construction.

    Where ranks divide a model, arguments and results of a layer are whole on every rank, but for those of ``linear``:
    a layer that computes a partial sum sums over the ranks itself. It may leave that to the layer that reads its
    result, if that layer can; ``sum_later`` settles this at construction. A class states these abilities for its own
    ``forward``: a derived class with another ``forward`` must state them again.
    """

    pluggable_name: ClassVar[str | None] = None
    capturable: ClassVar[bool] = True
    traceable: ClassVar[bool] = False
    input_spec: QuantSpec | None = None
    allocate: Callable[..., Any] | None = None
    """Returns empty, contiguous tensors like the results of ``forward`` for the same arguments. A layer that has it is
    one call of a compiled step; compilation sees through others, to the operators and layers that they call."""
    adapters: LinearAdapters | None = None
    """The slots of LoRA adapters that this layer adds to its result."""

    def __init_subclass__(cls, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.pluggable_name = name
        if "forward" in cls.__dict__:
            for attribute in ("return_partial_sums", "takes_partial_sums", "take_partial_sums"):
                if attribute not in cls.__dict__:
                    setattr(cls, attribute, PluggableLayer.__dict__[attribute])

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        self.path = ctx.path
        self.weights: dict[str, torch.Tensor] = {}

    def declare(self) -> dict[str, WeightSlot]:
        """Return the tensors that this layer needs from a checkpoint, by slot name.

        A replacement of a layer that has sub-layers may declare their slots itself, with dotted names
        (``"mixer.qkv.weight"``).
        """
        return {}

    def prepare(self) -> None:
        """Convert loaded weights for ``forward``; sub-layers are already prepared. Default: nothing."""

    def bind(self) -> None:
        """Create what needs final weights or the device. Called once, when all layers are prepared. Default: none."""

    def release(self) -> None:
        """Drop the weights."""
        self.weights.clear()

    def return_partial_sums(self) -> bool:
        """Return True, and partial sums from now on, if this layer can leave summing over ranks to the reader of its
        result.
        """
        return False

    @property
    def takes_partial_sums(self) -> bool:
        """True if ``forward`` can sum its first argument over the ranks."""
        return False

    def take_partial_sums(self, ctx: Context) -> None:
        """From now on, ``forward`` gets this rank's partial sum as its first argument, and may write to it."""
        raise NotImplementedError(f"{type(self).__name__} takes no partial sum")


def build_layer(ctx: Context, args: LayerArgs) -> PluggableLayer:
    """Construct the layer that ``args`` name, as the selector chooses it.

    Raises UnknownNameError where no plugin declares it, SelectionError where nothing can serve, PluginLoadError where
    the winner is no layer or cannot be built.
    """
    known = {str(offer.contribution.of) for offer in ctx.plugins.offers("layer")}
    if args.layer not in known:
        raise UnknownNameError("layer", args.layer, known, f"It stands in {type(args).__name__}.layer, at {ctx.path}.")
    return _build(args.layer, ctx, args)


def _build(name: str, ctx: Context, args: Any, *rest: Any, **options: Any) -> PluggableLayer:
    features: frozenset[Feature] = getattr(args, "features", frozenset())
    workload = LayerWorkload(of=name, dtype=dtype_name(ctx.dtype), args=args, features=features)
    offer = ctx.select(workload).offer
    winner = ctx.load(offer)
    kind, ctx = of_kind(offer, winner, PluggableLayer), ctx.for_plugin(offer.plugin)
    if offer.plugin == CORE:
        return kind.as_it_stands(ctx, args, *rest, **options)
    with blame(offer):
        layer = kind.as_it_stands(ctx, args, *rest, **options)
    _check_slots(offer, layer)
    ctx.kernel_calls.attach(offer, layer)
    return layer


def sum_later(ctx: Context, writer: PluggableLayer, reader: PluggableLayer) -> None:
    """Have ``reader`` sum over the ranks what ``writer`` returns, where both can; otherwise ``writer`` does.

    Nobody else may read it, and ``reader`` gets it as its first argument. ``ctx`` is that of ``reader``.
    """
    if ctx.parallel.tp.size > 1 and reader.takes_partial_sums and writer.return_partial_sums():
        reader.take_partial_sums(ctx)


def _check_slots(offer: Offer, layer: PluggableLayer) -> None:
    """Refuse a replacement whose ``declare`` fails or answers with something else than slots by name."""
    with blame(offer):
        slots: object = layer.declare()
    if not isinstance(slots, dict) or not all(
        isinstance(name, str) and isinstance(slot, WeightSlot) for name, slot in slots.items()
    ):
        raise misbehaved(offer, f"must return dict[str, WeightSlot] from declare(), got {slots!r}")


def checked_weights(offer: Offer, packed: object) -> dict[str, torch.Tensor]:
    """``packed``, what ``prepack`` of a kernel returned. Raises PluginLoadError unless it is tensors by name."""
    if not isinstance(packed, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in packed.items()
    ):
        raise misbehaved(offer, f"must return tensors by name from prepack(), got {packed!r:.80}")
    return packed


def walk(root: nn.Module, path: str = "") -> Iterator[tuple[str, PluggableLayer]]:
    """Yield every layer under ``root`` with its path, sub-layers before the layer that holds them."""
    for name, child in root.named_children():
        yield from walk(child, f"{path}.{name}" if path else name)
    if isinstance(root, PluggableLayer):
        yield path, root
