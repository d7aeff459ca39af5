"""What is asked of a family: a device, a workload, a config.

One frozen workload dataclass per family. The same object serves requirements, a target's own ``supports``, the tuning
key, conformance and benchmarks. Fields carry defaults, so that a new field breaks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import ClassVar, Literal

from hardpoint_plugin_api.device import DeviceInfo
from hardpoint_plugin_api.quant import QuantSpec, written_pair
from hardpoint_plugin_api.versions import ApiVersion

Phase = Literal["prefill", "decode"]
ScalarValue = bool | int | float | str


class Feature(StrEnum):
    """Workload features that a contribution must claim to be given.

    BATCH_INVARIANT is in the workloads of every numeric family where the user asks for it. It means that the bits of a
    result's row depend on that row of the inputs alone (in attention: on the query, its position, and the keys and
    values it reads), not on the other rows, their number, or the row's place among them. One implementation then serves
    steps of every size and phase. STATIC_CACHE_SCALES is in that of attention where the scales of an 8-bit cache are
    given. SHARDED is in the workload of a ``linear`` layer whose arguments divide its weight. SEVERAL_HOSTS is in that
    of an op of all ranks where these are on more than one machine. EXPERT_BIAS is in that of experts with biases: see
    ``experts``. PIPELINE_STAGES is in those of a model and of ``decoder_stack`` where ranks divide the model's blocks.
    """

    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    SOFT_CAP = "soft_cap"
    ALIBI = "alibi"
    SINKS = "sinks"
    STATIC_CACHE_SCALES = "static_cache_scales"
    NON_CAUSAL = "non_causal"
    BATCH_INVARIANT = "batch_invariant"
    SHARDED = "sharded"
    SEVERAL_HOSTS = "several_hosts"
    EXPERT_BIAS = "expert_bias"
    PIPELINE_STAGES = "pipeline_stages"


FEATURE_SINCE: dict[Feature, ApiVersion] = dict.fromkeys(Feature, ApiVersion(0, 2))
"""The API version that each feature came with."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Base of all workloads. ``of`` is the op, layer or model architecture wanted, where the family has one."""

    family: ClassVar[str] = ""
    of: str | None = None
    features: frozenset[Feature] = frozenset()

    def key(self) -> str:
        """A stable text of every field that is set: the tuning key, and a row's title in ``explain``.

        Fields that are left out of a workload's repr, long texts, are left out here too.
        """
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "of" or not f.repr or value is None or value in (frozenset(), ()):
                continue
            if isinstance(value, frozenset):
                value = "|".join(sorted(value))
            elif f.name == "spec" and isinstance(value, tuple):
                value = written_pair(value)
            elif f.name == "scalars":
                parts += [f"{name}={scalar}" for name, scalar in value]
                continue
            parts.append(f"{f.name}={value}")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class PlatformWorkload(Workload):
    """Which platform runs the engine."""

    family: ClassVar[str] = "platform"


@dataclass(frozen=True, kw_only=True)
class OpWorkload(Workload):
    """One use of an op. ``layout`` is the cache layout, where the op touches a cache; ``spec`` its output's spec.

    ``routing`` names the op that chooses experts, where this one contains it. Of an op of all ranks, ``parallel`` is
    what the group of ``ranks`` shares (``tp``), and ``hidden_size`` the width of a row. ``scalars`` are the values, by
    name, of those keyword arguments that this use gives in every call: of the op's ``static`` ones, as far as they are
    known when it is bound.
    """

    family: ClassVar[str] = "op"
    dtype: str | None = None
    head_size: int | None = None
    layout: str | None = None
    activation: str | None = None
    spec: QuantSpec | None = None
    routing: str | None = None
    parallel: str | None = None
    ranks: int | None = None
    hidden_size: int | None = None
    scalars: tuple[tuple[str, ScalarValue], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerWorkload(Workload):
    """One use of a pluggable layer; ``args`` is the dataclass its constructor takes."""

    family: ClassVar[str] = "layer"
    dtype: str | None = None
    args: object = None


@dataclass(frozen=True, kw_only=True)
class AttentionWorkload(Workload):
    """One group of causal self-attention: layers of equal shape, features and cache."""

    family: ClassVar[str] = "attention"
    of: str | None = "causal"
    dtype: str | None = None
    kv_dtype: str | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class LatentWorkload(Workload):
    """One group of latent attention; sizes as in LatentSpec."""

    family: ClassVar[str] = "attention"
    of: str | None = "latent"
    dtype: str | None = None
    kv_dtype: str | None = None
    num_heads: int | None = None
    latent_size: int | None = None
    rope_size: int | None = None
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class LinearWorkload(Workload):
    """One matmul: ``y[tokens, out] = x[tokens, in] @ w[out, in].T``, with the specs of weight and activation."""

    family: ClassVar[str] = "linear"
    dtype: str | None = None
    in_features: int | None = None
    out_features: int | None = None
    spec: tuple[QuantSpec, QuantSpec] | None = None


@dataclass(frozen=True, kw_only=True)
class QuantizationWorkload(Workload):
    """A quantization method; ``of`` is the name that a checkpoint's config or the command line gives."""

    family: ClassVar[str] = "quantization"


@dataclass(frozen=True, kw_only=True)
class ElementWorkload(Workload):
    """An element, a number format of quantized matrices. Nothing is selected: specs say which element they are of."""

    family: ClassVar[str] = "element"


@dataclass(frozen=True, kw_only=True)
class ExpertsWorkload(Workload):
    """One mixture-of-experts layer.

    ``spec`` is that of both matrices and their inputs; ``activation`` as in MoEArgs.experts_activation; ``routing`` the
    op that chooses experts; ``format`` that of activations, see ``experts``. ``parallel`` is how the group's ranks
    share the layer: ``none``, ``tp`` (each has a slice of every expert), ``ep`` (each has whole experts), ``tp+ep``.
    ``num_experts`` and ``intermediate_size`` are those of this rank.
    """

    family: ClassVar[str] = "experts"
    dtype: str | None = None
    spec: tuple[QuantSpec, QuantSpec] | None = None
    activation: str | None = None
    routing: str | None = None
    parallel: str | None = None
    layout: str | None = None
    format: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class All2AllWorkload(Workload):
    """Dispatch and combine between the ranks of an expert-parallel group.

    ``parallel`` is as in ExpertsWorkload; ``num_experts`` are those of all ``ranks``.
    """

    family: ClassVar[str] = "all2all"
    dtype: str | None = None
    parallel: str | None = None
    ranks: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    hidden_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class CommunicatorWorkload(Workload):
    """Collectives of one group of ``ranks``.

    ``parallel`` is what it shares: ``tp`` (slices), ``ep`` (experts), or ``pp`` (blocks; this group only sends and
    receives).
    """

    family: ClassVar[str] = "communicator"
    dtype: str | None = None
    parallel: str | None = None
    ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelWorkload(Workload):
    """A model architecture; ``of`` is the class name in a checkpoint's ``config.json``."""

    family: ClassVar[str] = "model"
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class DrafterWorkload(Workload):
    """Drafts for an engine's requests: at most ``num_drafts`` tokens for a request and step."""

    family: ClassVar[str] = "drafter"
    num_drafts: int | None = None


@dataclass(frozen=True, kw_only=True)
class ToolParserWorkload(Workload):
    """Tool calls in a model's output.

    ``chat_template`` is the text of all the model's chat templates, by which a parser is chosen; None where the user
    chose one by name. ``special_tokens`` are the texts of the tokenizer's added tokens, special ones among them.
    """

    family: ClassVar[str] = "tool_parser"
    architecture: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, kw_only=True)
class ReasoningParserWorkload(Workload):
    """Reasoning in a model's output; fields as in ToolParserWorkload."""

    family: ClassVar[str] = "reasoning_parser"
    architecture: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class Request:
    """A question to the selector. ``config`` holds the user's settings as plain data."""

    device: DeviceInfo
    workload: Workload
    config: Mapping[str, object] = field(default_factory=dict, compare=False)
