"""Quantization methods: from what a checkpoint holds for a module to a scheme, beyond which nothing knows who wrote it.

A method (family ``quantization``, its ``of`` the name that checkpoints and ``--quantization`` give) is built once per
engine and asked for a **scheme** of each matrix: two numeric specs, and the tensors that the checkpoint holds for it,
each with the function that turns it into the spec's canonical **slots**. Kernels see slots and specs alone.

The slots of a matrix [out, in] with weight spec ``w``:

| slot                | shape                           | dtype                     | where                  |
|---------------------|---------------------------------|---------------------------|------------------------|
| weight              | [out, in / w.per_byte]          | w.storage                 | always                 |
| weight_scale        | w.scales[0].shape(out, in)      | w.scales[0].format        | one level or more      |
| weight_scale_2, ... | w.scales[1].shape(out, in), ... | w.scales[1].format, ...   | two levels or more     |
| weight_min, ...     | as weight_scale, ...            | as weight_scale, ...      | w.minimum              |
| weight_zero_point   | as weight_scale                 | uint8, or int8 if signed  | w.zero_point           |
| weight_group_index  | [in]: each column's group       | int32                     | w.permuted             |
| input_scale         | [1]                             | float32                   | static activations     |
| input_zero_point    | [1]                             | as above                  | static with zero point |

A layer that is merged of several modules (q, k and v) has one matrix of their rows, where nothing is lost by that: a
scale for a whole tensor becomes one for each row. While it loads it has the last three slots once for each module,
[modules, ...].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from hardpoint_plugin_api.dequantization import minimum_slot, scale_slot
from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.layers import WeightSlot
from hardpoint_plugin_api.quant import QuantSpec
from hardpoint_plugin_api.reasons import Reason
from hardpoint_plugin_api.requests import QuantizationWorkload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype (name of a torch dtype) of a tensor, from the header of a checkpoint file."""

    shape: tuple[int, ...]
    dtype: str


class CheckpointTensors(Protocol):
    """A checkpoint's tensors by name. ``info`` reads headers only; ``read`` is meant for tensors of a few kilobytes."""

    @property
    def title(self) -> str:
        """Where it is, for messages."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts that the files carry beside their tensors, of all files together; empty where there are none."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor; KeyError where there is none of that name."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the host."""
        ...


@dataclass(frozen=True)
class ExpertStack:
    """One matrix of all experts of a layer, which a checkpoint holds in one tensor.

    ``tensor`` is the tensor's name within the module where it is not quantized, ``count`` the number of experts.
    ``parts``: how many matrices of as many rows share the rows (2: gate and up). ``interleaved``: their rows alternate
    (gate, up, gate, up, ...), else one matrix follows the other. ``transposed``: the tensor that is not quantized is
    [experts, in, out].
    """

    tensor: str
    count: int
    parts: int = 1
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Module:
    """One matrix of a checkpoint. ``name`` is its module's name there, without the tensor's own name.

    ``kind``: ``linear`` (expert matrices included), ``lm_head`` for an output head that is not tied to the embedding,
    or ``router`` for the router of a mixture of experts and the gate of a shared expert. ``expert``: the number of the
    routed expert that the matrix belongs to, else None. All experts of a layer must have one scheme. ``stack``: set
    where the matrix stands for all experts, see ``QuantizationMethod.reads_stacks``. ``own_in_features``: how many
    columns each rank has, of an expert the greatest common divisor of those of all its matrices; None where that is not
    known.
    """

    name: str
    out_features: int
    in_features: int
    kind: Literal["linear", "lm_head", "router"] = "linear"
    expert: int | None = None
    stack: ExpertStack | None = None
    own_in_features: int | None = None


@dataclass(frozen=True)
class Dim:
    """One axis of a stored tensor: ``count`` indices of it stand for ``per`` rows ("out") or columns ("in").

    ``axis`` "expert" is the axis of a stack's experts; None is an axis of size ``per`` whatever the matrix. From this
    follow a tensor's shape, and which slice of it a rank needs that has a slice of the matrix.
    """

    axis: Literal["out", "in", "expert"] | None
    per: int = 1
    count: int = 1

    def size(self, out_features: int, in_features: int, experts: int = 1) -> int:
        """The number of indices for a matrix [out_features, in_features], or ``experts`` of them."""
        if self.axis is None:
            return self.per
        return -(-{"out": out_features, "in": in_features, "expert": experts}[self.axis] // self.per) * self.count


@dataclass(frozen=True)
class StoredTensor:
    """One tensor that a checkpoint holds for a module (``MODULE.name``), and how it becomes slots.

    ``read`` takes the tensor as stored, on any device and with any strides; with several ranks, a slice of it. It
    returns the slots that it fills: none for a tensor that is only checked (CheckpointError), several for a matrix that
    is quantized while it loads. The results may share its memory; it is not changed. A slot with fewer rows than its
    part is broadcast. Of a module with a ``stack``, slots have an axis of experts in front, and rows in the order of
    the checkpoint.

    ``read_stack`` takes several such tensors of one shape, [E, *shape], and returns what ``read`` makes of each, with
    an axis of E in front. Small matrices of a layer's experts are gathered for it, since calls cost more than their
    work: the gate of some experts, or up, or down, of which any's ``read_stack`` reads all.
    """

    name: str
    dims: tuple[Dim, ...]
    dtypes: tuple[str, ...]
    fills: tuple[str, ...]
    read: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] = field(compare=False)
    read_stack: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] | None = field(default=None, compare=False)

    def shape(self, out_features: int, in_features: int, experts: int = 1) -> tuple[int, ...]:
        """Return the tensor's shape for a matrix [out_features, in_features], or a stack of ``experts`` of them."""
        return tuple(dim.size(out_features, in_features, experts) for dim in self.dims)


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored and multiplied: the specs of weight and activation, and the checkpoint's tensors.

    Modules can be merged into one matrix (such as q, k and v) where their specs and their values of ``must_agree`` are
    equal. Examples of ``must_agree``: the scale of static activations, the order of columns.
    """

    weight: QuantSpec
    activation: QuantSpec
    stored: tuple[StoredTensor, ...] = field(default=(), compare=False)
    must_agree: Hashable = None

    @classmethod
    def plain(cls, dtype: str) -> Scheme:
        """Numbers of ``dtype`` as they are, stored as ``MODULE.weight``."""
        return cls(QuantSpec(dtype), QuantSpec(dtype))

    @property
    def pair(self) -> tuple[QuantSpec, QuantSpec]:
        """The two specs by which kernels are selected."""
        return self.weight, self.activation


@dataclass(frozen=True)
class CacheScales:
    """The scales of one attention layer's cache that a checkpoint holds: names of tensors of one float each.

    ``element``: that of the caches that they are for; ``nvfp4`` for those whose groups have scales.
    """

    k: str
    v: str
    element: str = "float8_e4m3fn"


@dataclass(frozen=True)
class MethodRequest:
    """The arguments of a method's constructor. Later versions add fields.

    ``config``: the checkpoint's ``quantization_config``; None where the checkpoint is not quantized and the method
    quantizes while loading. ``options``: the user's ``--quantization-options``. ``dtype``: that of activations.
    ``where``: the name of the config's file, for messages.
    """

    config: Mapping[str, object] | None
    options: Mapping[str, str]
    tensors: CheckpointTensors
    dtype: str
    device: DeviceInfo
    where: str


class QuantizationMethod(ABC):
    """A quantization method. ``online``: it quantizes the weights of unquantized checkpoints, while they load.

    ``reads_stacks``: ``scheme`` is asked for modules with a ``stack``, too. Without it, models whose checkpoints hold
    all experts of a layer in one tensor are refused.
    """

    online: ClassVar[bool] = False
    reads_stacks: ClassVar[bool] = False

    @classmethod
    def supports(cls, workload: QuantizationWorkload, device: DeviceInfo) -> list[Reason]:
        """Return reasons against serving ``workload`` that the manifest cannot express. Default: none."""
        return []

    @abstractmethod
    def __init__(self, request: MethodRequest) -> None:
        """Read the config, once. Raises CheckpointError (ConfigError for the user's options), naming key and value."""

    @abstractmethod
    def scheme(self, module: Module) -> Scheme | None:
        """Return the scheme of one matrix, or None for a matrix that is not quantized.

        Raises CheckpointError for faults that can be found before weights are read.
        """

    def leave_tied_head(self) -> None:  # noqa: B027  # most have nothing to say
        """Called where the output head is the embedding, which stays as it is and has no scheme.

        Raises ConfigError where the user's options ask for it.
        """

    def embedding(self, module: Module, *, tied: bool) -> Scheme | None:
        """Return the scheme of the embedding [vocabulary, hidden]; None where the checkpoint holds plain numbers.

        ``tied``: it is the output head, too. Else its rows are looked up and nothing more, and the weight of the scheme
        must be plain: what is stored becomes numbers of the model's dtype while it loads.
        """
        return None

    def numbers(self, module: Module) -> Scheme | None:
        """Return the scheme by which one matrix becomes plain numbers of the model's dtype while it loads; None where
        the checkpoint holds such.

        A method that overrides this is asked for the experts of a layer of which some are quantized unlike the others,
        gate unlike up, or w2 alone or w13 alone: no kernel runs such. Without it such checkpoints are refused.
        """
        return None

    def cache_scales(self, attention: str) -> CacheScales | None:
        """Return the KV cache scales of the attention module ``attention``; None where the checkpoint has none."""
        return None


def weight_slots(
    scheme: Scheme, parts: Sequence[tuple[str, int]], columns: int, stack: tuple[int, ...] = ()
) -> dict[str, WeightSlot]:
    """Return the slots of a matrix with the rows of ``parts``; with ``stack``, of one such matrix for each number."""
    lead = (len(stack),) if stack else ()
    rows = sum(n for _, n in parts)
    named = len(parts) > 1

    def slot(shape: tuple[int, ...], dtype: str, of_parts: Callable[[int], int] | None) -> WeightSlot:
        divided = tuple((name, of_parts(n)) for name, n in parts) if named and of_parts else ()
        return WeightSlot((*lead, *shape), dtype, len(lead) if of_parts else None, divided, stack)

    weight = scheme.weight
    slots = {"weight": slot((rows, columns // weight.per_byte), weight.storage, lambda n: n)}
    for level, scale in enumerate(weight.scales):
        per = scale.block[0]
        by_parts = None if per == -1 else lambda n, per=per: -(-n // per)
        for name in (scale_slot(level), *((minimum_slot(level),) if weight.minimum else ())):
            slots[name] = slot(scale.shape(rows, columns), scale.format, by_parts)
        if level == 0 and weight.zero_point:
            slots["weight_zero_point"] = slot(scale.shape(rows, columns), weight.zero_point_dtype, by_parts)
    each = (len(parts),)
    if weight.permuted:
        slots["weight_group_index"] = slot((*each, columns), "int32", lambda n: 1)
    given = scheme.activation.scales if scheme.activation.static else scheme.activation.scales[1:]
    for level, _ in enumerate(given, start=len(scheme.activation.scales) - len(given)):
        slots[scale_slot(level, "input")] = slot(each, "float32", lambda n: 1)
    if scheme.activation.static and scheme.activation.zero_point:
        slots["input_zero_point"] = slot(each, scheme.activation.zero_point_dtype, lambda n: 1)
    return slots
