"""Requests to the selector: a device, a workload and the user's settings.

Each family has one frozen workload dataclass. Requirements, ``supports``, tuning keys, the conformance kit and
benchmarks use the same object. Fields have defaults, so that a new field breaks no plugin.
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
    """Features of a workload. A contribution is offered a workload only if it claims all features in use.

    BATCH_INVARIANT, for every numeric family where the user asks for it: the bits of a result's row depend on that row
    of the inputs alone (in attention: on the query, its position, and the keys and values it reads), not on other rows,
    their number, or their order. One implementation then serves all sizes and phases. STATIC_CACHE_SCALES, attention:
    the scales of an 8-bit cache are given. SHARDED, layer ``linear``: its arguments divide the weight among ranks.
    SEVERAL_HOSTS, communicators, all-to-alls and ops of all ranks: ranks are on more than one machine. EXPERT_BIAS,
    experts: experts have biases; see ``experts``. PIPELINE_STAGES, model and ``decoder_stack``: ranks divide the
    model's blocks. INDEX_LISTS, latent attention: each query reads the positions of a list, see LatentCall.
    SEVERAL_REPLICAS, all-to-alls: ranks of several replicas share the experts; each has tokens of its own, and any
    number of them up to a step's most. W2_SPEC, experts: the matrix w2 has specs of its own, see ExpertsWorkload.
    """

    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    SOFT_CAP = "soft_cap"
    ALIBI = "alibi"
    SINKS = "sinks"
    STATIC_CACHE_SCALES = "static_cache_scales"
    BATCH_INVARIANT = "batch_invariant"
    SHARDED = "sharded"
    SEVERAL_HOSTS = "several_hosts"
    EXPERT_BIAS = "expert_bias"
    PIPELINE_STAGES = "pipeline_stages"
    INDEX_LISTS = "index_lists"
    SEVERAL_REPLICAS = "several_replicas"
    W2_SPEC = "w2_spec"


FEATURE_SINCE: dict[Feature, ApiVersion] = dict.fromkeys(Feature, ApiVersion(0, 2))
"""The API version that each feature came with."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The base of all workloads. ``of`` is the op, layer or model architecture, in families that have one."""

    family: ClassVar[str] = ""
    of: str | None = None
    features: frozenset[Feature] = frozenset()

    def key(self) -> str:
        """Return a stable text of all fields that are set: the key of tuning files, and the title of a row in
        ``explain``.

        Fields without a repr (long texts) are left out.
        """
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "of" or not f.repr or value is None or value in (frozenset(), ()):
                continue
            if isinstance(value, frozenset):
                value = "|".join(sorted(value))
            elif f.name in ("spec", "w2_spec") and isinstance(value, tuple):
                value = written_pair(value)
            elif f.name == "scalars":
                parts += [f"{name}={scalar}" for name, scalar in value]
                continue
            parts.append(f"{f.name}={value}")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class PlatformWorkload(Workload):
    """The choice of the platform that runs the engine."""

    family: ClassVar[str] = "platform"


@dataclass(frozen=True, kw_only=True)
class OpWorkload(Workload):
    """One use of an op. A field that the op has no use for is None.

    ``layout`` and ``kv_dtype``: the KV cache's, for an op that reads or writes it. ``spec``: the quantization of the
    output. ``routing``: the name of the op that chooses experts, for a composite op that calls it. For an op that sums
    over ranks: ``parallel`` names the group (``tp``), ``ranks`` is its size, ``hidden_size`` the length of a row.
    ``scalars``: names and values of the op's ``static`` keyword arguments. They are the same in every call of this use.
    """

    family: ClassVar[str] = "op"
    dtype: str | None = None
    head_size: int | None = None
    layout: str | None = None
    kv_dtype: str | None = None
    activation: str | None = None
    spec: QuantSpec | None = None
    routing: str | None = None
    parallel: str | None = None
    ranks: int | None = None
    hidden_size: int | None = None
    scalars: tuple[tuple[str, ScalarValue], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerWorkload(Workload):
    """One use of a pluggable layer; ``args`` is the dataclass that its constructor takes."""

    family: ClassVar[str] = "layer"
    dtype: str | None = None
    args: object = None


@dataclass(frozen=True, kw_only=True)
class AttentionWorkload(Workload):
    """A group of causal self-attention layers of equal shape, features and cache."""

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
    """A group of latent attention layers; sizes and ``top_k`` are as in LatentSpec."""

    family: ClassVar[str] = "attention"
    of: str | None = "latent"
    dtype: str | None = None
    kv_dtype: str | None = None
    num_heads: int | None = None
    latent_size: int | None = None
    rope_size: int | None = None
    block_size: int | None = None
    top_k: int | None = None


@dataclass(frozen=True, kw_only=True)
class LinearWorkload(Workload):
    """One matrix multiplication, ``y[tokens, out] = x[tokens, in] @ w[out, in].T``, with the specs of weight and
    activation.
    """

    family: ClassVar[str] = "linear"
    dtype: str | None = None
    in_features: int | None = None
    out_features: int | None = None
    spec: tuple[QuantSpec, QuantSpec] | None = None


@dataclass(frozen=True, kw_only=True)
class QuantizationWorkload(Workload):
    """A quantization method; ``of`` is its name in a checkpoint's config, or in ``--quantization``."""

    family: ClassVar[str] = "quantization"


@dataclass(frozen=True, kw_only=True)
class ElementWorkload(Workload):
    """An element: a number format of quantized matrices. No selection takes place; a spec names its element."""

    family: ClassVar[str] = "element"


@dataclass(frozen=True, kw_only=True)
class ExpertsWorkload(Workload):
    """The experts of one mixture-of-experts layer.

    ``spec``: that of both matrices and their inputs. ``w2_spec``: that of w2 and its input where it differs from w13's;
    ``features`` then has W2_SPEC. Read either by ``spec_of``. ``activation``: as in MoEArgs.experts_activation.
    ``routing``: the op that chooses experts. ``format``: the format of activations, see ``experts``. ``parallel``: how
    ranks share the layer: ``none``, ``tp`` (each rank has a slice of every expert), ``ep`` (each rank has whole
    experts), ``tp+ep``. ``num_experts`` and ``intermediate_size`` are those of this rank.
    """

    family: ClassVar[str] = "experts"
    dtype: str | None = None
    spec: tuple[QuantSpec, QuantSpec] | None = None
    w2_spec: tuple[QuantSpec, QuantSpec] | None = None
    activation: str | None = None
    routing: str | None = None
    parallel: str | None = None
    layout: str | None = None
    format: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None

    def spec_of(self, matrix: str) -> tuple[QuantSpec, QuantSpec] | None:
        """Return the specs of ``matrix`` (``w13`` or ``w2``) and of its input."""
        return self.w2_spec if matrix == "w2" and self.w2_spec is not None else self.spec


@dataclass(frozen=True, kw_only=True)
class All2AllWorkload(Workload):
    """Dispatch and combine among the ranks of an expert-parallel group.

    ``parallel`` is as in ExpertsWorkload; ``num_experts`` counts the experts of all ``ranks``.
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
    """The collectives of one group of ``ranks``.

    ``parallel`` is what the group shares: ``tp`` (slices of layers), ``ep`` (experts), or ``pp`` (blocks; this group
    only sends and receives).
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
    """Speculative decoding: at most ``num_drafts`` drafted tokens per request and step."""

    family: ClassVar[str] = "drafter"
    num_drafts: int | None = None


@dataclass(frozen=True, kw_only=True)
class ToolParserWorkload(Workload):
    """The parser of tool calls in a model's output.

    ``architecture``: the class name in the checkpoint's ``config.json``. ``chat_template``: the text of all the model's
    chat templates, by which a parser is chosen; None where the user named one. ``special_tokens``: the texts of the
    tokenizer's added tokens.
    """

    family: ClassVar[str] = "tool_parser"
    architecture: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True, kw_only=True)
class ReasoningParserWorkload(Workload):
    """The parser of reasoning in a model's output. Its fields are those of ToolParserWorkload."""

    family: ClassVar[str] = "reasoning_parser"
    architecture: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class Request:
    """A request to the selector. ``config`` holds the user's settings as plain data."""

    device: DeviceInfo
    workload: Workload
    config: Mapping[str, object] = field(default_factory=dict, compare=False)
