"""Constructor arguments of core's pluggable layers, and the weight slots a layer declares.

They are dataclasses here, so that a plugin that replaces a layer needs nothing but this package to know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from hardpoint_plugin_api.quant import QuantSpec
from hardpoint_plugin_api.requests import Feature
from hardpoint_plugin_api.sharding import ShardPlan, joined

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Scoring = Literal["softmax", "sigmoid"]


class LayerArgs(Protocol):
    """Arguments that say which layer they are for: ``layer`` is its name, the ``of`` of its contributions.

    A plugin that adds a mixer or a feed-forward writes a frozen dataclass like the ones below, and blocks build its
    layer from that.
    """

    layer: ClassVar[str]


@dataclass(frozen=True)
class RopeArgs:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its context extensions.

    ``rotary_dim`` leading elements of a head are rotated.
    ``interleaved`` pairs (2i, 2i+1) instead of (i, i+d/2).
    ``scaling`` holds the numeric parameters of ``kind`` as they stand in a Hugging Face config.
    """

    rotary_dim: int
    theta: float
    kind: RopeKind = "default"
    interleaved: bool = False
    scaling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class LinearArgs:
    """A linear layer. ``parts`` are the named row blocks of a merged one, in order: (("q", 512), ("k", 128), ...).

    ``kind`` tells quantization methods an output head from the others, one that is tied (the embedding), and what is
    small and decides much: the ``router`` of a mixture of experts.

    ``row_shards`` (one for each part) or ``column_shard`` say how a group of ranks divides the weight. Divided by rows,
    a rank makes its rows of the output; divided by columns, it takes its columns of the input and makes a partial sum
    of the output, of which rank 0's holds the bias. ``in_features`` and ``parts`` are of the whole weight.
    """

    in_features: int
    parts: tuple[tuple[str, int], ...]
    bias: bool = False
    kind: Literal["linear", "lm_head", "embedding", "router"] = "linear"
    row_shards: tuple[ShardPlan, ...] = ()
    column_shard: ShardPlan | None = None

    @property
    def out_features(self) -> int:
        """Rows of the whole weight."""
        return sum(rows for _, rows in self.parts)

    @property
    def own_parts(self) -> tuple[tuple[str, int], ...]:
        """The parts with the rows that are on this rank."""
        if not self.row_shards:
            return self.parts
        return tuple((name, plan.size) for (name, _), plan in zip(self.parts, self.row_shards, strict=True))

    @property
    def own_in_features(self) -> int:
        """The columns that are on this rank."""
        return self.in_features if self.column_shard is None else self.column_shard.size

    @property
    def features(self) -> frozenset[Feature]:
        """What an implementation must be able to do."""
        return frozenset({Feature.SHARDED} if self.row_shards or self.column_shard else ())


@dataclass(frozen=True)
class NormArgs:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467).

    ``spec`` is the form in which all who read the normed values want them: the layer may return these as ``Quantized``
    then, or plain all the same.
    """

    size: int
    eps: float
    spec: QuantSpec | None = None


@dataclass(frozen=True)
class EmbeddingArgs:
    """A token embedding or the output head: ``vocab_size`` rows of ``hidden_size``; ``tied`` where they are one."""

    vocab_size: int
    hidden_size: int
    tied: bool = False


@dataclass(frozen=True)
class AttentionArgs:
    """Self-attention of a decoder: projections, optional per-head norm of q and k, rotary embedding, cache.

    ``window``, ``chunk``, ``soft_cap``, ``sinks`` and ``alibi`` are as in AttentionSpec.
    """

    layer: ClassVar[str] = "attention"

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: RopeArgs | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False


@dataclass(frozen=True)
class LinearAttentionArgs:
    """Linear attention with a decay for each head, as in RetNet (arXiv:2307.08621, equation 6) without rotation.

    Each head has a state S [head_size, head_size]: ``S_t = decay * S_{t-1} + k_t v_t^T`` and ``o_t = scale * q_t S_t``,
    from S = 0 before the first token. ``decays`` has one number from 0 to 1 for each head.
    """

    layer: ClassVar[str] = "linear_attention"

    hidden_size: int
    head_size: int
    decays: tuple[float, ...]
    scale: float = 1.0

    @property
    def num_heads(self) -> int:
        """Heads of queries, keys and values alike."""
        return len(self.decays)


@dataclass(frozen=True)
class MLAArgs:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): projections, norms, rotary embedding, cache.

    A token's latent [``latent_size``] is normed and cached, beside a rotated key [``rope_size``] that all heads share.
    A head's query has ``nope_size`` elements that meet the head's key, made of the latent, and ``rope_size`` rotated
    ones; its value, made of the latent, has ``value_size``. ``scale`` multiplies scores. Queries are made of a normed
    vector of ``query_rank`` elements, or of the hidden state itself where that is None. ``bias`` is that of the
    projections from and to hidden states. ``norm_eps`` is that of both norms; ``rope.rotary_dim`` is ``rope_size``.
    """

    layer: ClassVar[str] = "mla"

    hidden_size: int
    num_heads: int
    latent_size: int
    rope_size: int
    nope_size: int
    value_size: int
    scale: float
    rope: RopeArgs
    query_rank: int | None = None
    bias: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class MLPArgs:
    """A gated feed-forward: ``down(activation(gate(x)) * up(x))``; ungated where ``gated`` is False."""

    layer: ClassVar[str] = "mlp"

    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class RouterArgs:
    """How a router's logits become ``top_k`` experts and their weights for each token.

    ``scoring`` turns logits into scores. ``bias`` says that there is a correction bias (float32, one for each expert),
    added to the scores for the choice alone (arXiv:2408.15664). With ``num_groups`` above 1 the experts are that many
    groups of neighbours, and only those of a token's ``top_groups`` best are chosen from (arXiv:2412.19437).
    ``renormalize`` divides a token's weights by their sum; ``scaling`` multiplies them afterwards. ``linear_bias`` says
    that the linear layer that makes the logits has a bias.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    bias: bool = False
    renormalize: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    linear_bias: bool = False

    @property
    def routing(self) -> str:
        """The op that does it: what workloads carry as ``routing``."""
        return "grouped_topk" if self.num_groups > 1 else f"topk_{self.scoring}"


@dataclass(frozen=True)
class MoEArgs:
    """A mixture of experts: each token goes through ``router.top_k`` of its feed-forwards, summed by router weights.

    Experts are like ``MLPArgs``, ``intermediate_size`` wide each; ``bias`` says that both of their matrices have one.
    Where ``shared_size`` is above 0, a gated feed-forward of that width serves every token beside them
    (arXiv:2401.06066); ``shared_gate`` says that its output is multiplied by the sigmoid of one more linear's output
    per token. ``swiglu_alpha`` and ``swiglu_limit`` are parameters of the activation ``swiglu_oai`` (arXiv:2508.10925):
    ``g * sigmoid(alpha * g) * (u + 1)``, with the gate g at most ``limit`` and u within ``limit`` of zero.
    """

    layer: ClassVar[str] = "moe"

    hidden_size: int
    intermediate_size: int
    router: RouterArgs
    activation: str = "silu"
    gated: bool = True
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    @property
    def experts_activation(self) -> str:
        """The middle of an expert, by the name that workloads and manifests give it.

        ``relu2`` and the like where nothing is gated; ``silu_and_mul`` and the like where the first half gates the
        second. ``swiglu_oai`` is gated always, and has gpt-oss's parameters; with others it is
        ``swiglu_oai(ALPHA,LIMIT)``, another activation for whoever claims names.
        """
        if self.activation == "swiglu_oai":
            ours, theirs = (self.swiglu_alpha, self.swiglu_limit), (MoEArgs.swiglu_alpha, MoEArgs.swiglu_limit)
            return "swiglu_oai" if ours == theirs else f"swiglu_oai({self.swiglu_alpha},{self.swiglu_limit})"
        return f"{self.activation}_and_mul" if self.gated else self.activation


@dataclass(frozen=True)
class BlockArgs:
    """One pre-norm decoder block: (x, residual) -> (x, residual).

    ``mixer`` brings a sequence's tokens together, as attention does; ``feed_forward`` takes each by itself. Both are
    called as ``forward(x, step)``, [T, hidden] -> [T, hidden]. ``norm`` stands before each of them.
    """

    mixer: LayerArgs
    feed_forward: LayerArgs
    norm: NormArgs


@dataclass(frozen=True)
class StackArgs:
    """Decoder blocks, one after the other: all of a model, or those of one pipeline stage.

    The first of ``blocks`` is number ``first`` of the ``total`` blocks of the model. Layer paths and slots of a block
    bear its number in the model: ``blocks.NUMBER.mixer``. A ``total`` of 0 says that the model has no others.
    """

    layer: ClassVar[str] = "decoder_stack"

    blocks: tuple[BlockArgs, ...]
    first: int = 0
    total: int = 0

    @property
    def features(self) -> frozenset[Feature]:
        """The features that an implementation must claim."""
        return frozenset({Feature.PIPELINE_STAGES} if len(self.blocks) < self.total else ())


@dataclass(frozen=True)
class WeightSlot:
    """One tensor that a layer wants: shape and dtype (a torch dtype's name) on this rank, before any packing.

    ``parts`` are named blocks along axis 0, in order, which a checkpoint may hold as tensors of their own; empty means
    one unnamed part. ``shard_axis`` is the axis that tensor parallelism divides, or None for a replicated weight.
    ``shards`` says how: one plan for each of ``parts`` where these lie along that axis, else one in all; without any
    the tensor is whole on every rank.

    Where ``stack`` is given, axis 0 holds tensors that are alike, such as those of a model's experts, by these numbers
    in this order. A checkpoint may hold each as a tensor of its own: part ``"3"`` is number 3 without axis 0. ``parts``
    are blocks along axis 1 then, and ``"3.gate"`` is the part ``gate`` of number 3. ``stack_of`` is how many there are
    in all, from 0, where other ranks hold the rest of them; 0 means that they are all here.
    """

    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    stack: tuple[int, ...] = ()
    shards: tuple[ShardPlan, ...] = ()
    stack_of: int = 0

    def shard(self, part: str | None) -> tuple[int, ShardPlan] | None:
        """The axis of the slot along which ``part`` (None: the whole) is divided, and how; None where it is not."""
        if not self.shards:
            return None
        assert self.shard_axis is not None
        if len(self.shards) == 1:
            return self.shard_axis, self.shards[0]
        block = (part or "").rpartition(".")[2] if self.stack else part
        names = [name for name, _ in self.parts]
        if block in names:
            return self.shard_axis, self.shards[names.index(block)]
        return self.shard_axis, joined(self.shards)

    def stored_shape(self, part: str | None) -> tuple[int, ...]:
        """The shape of ``part`` (None: the whole) in a checkpoint: with what other ranks hold of it."""
        shape, found = list(self.part_shape(part)), self.shard(part)
        if self.stack and part is None:
            shape[0] = self.stack_of or len(self.stack)
        if found is not None:
            axis, plan = found
            shape[axis - (len(self.shape) - len(shape))] = plan.full
        return tuple(shape)

    def is_elsewhere(self, part: str | None) -> bool:
        """Whether ``part`` is of a number that other ranks hold."""
        number = (part or "").partition(".")[0]
        return number.isdecimal() and int(number) < self.stack_of and int(number) not in self.stack

    def part_rows(self, part: str | None) -> tuple[int, int]:
        """Start and length of ``part`` (None: the whole) along the axis that ``parts`` divide."""
        if part is None:
            return 0, self.shape[1 if self.stack else 0]
        start = 0
        for name, rows in self.parts:
            if name == part:
                return start, rows
            start += rows
        raise KeyError(part)

    def part_index(self, part: str | None) -> tuple[int | slice, ...]:
        """Where ``part`` (None: the whole) lies in the tensor, as an index into it. Raises KeyError for no part."""
        if not self.stack or part is None:
            start, rows = (0, self.shape[0]) if part is None else self.part_rows(part)
            return (slice(start, start + rows),)
        number, _, block = part.partition(".")
        if not number.isdecimal() or int(number) not in self.stack:
            raise KeyError(part)
        start, rows = self.part_rows(block or None)
        return self.stack.index(int(number)), slice(start, start + rows)

    def part_shape(self, part: str | None) -> tuple[int, ...]:
        """The shape of ``part`` (None: the whole)."""
        index = self.part_index(part)
        cut = tuple(i.stop - i.start for i in index if isinstance(i, slice))
        return (*cut, *self.shape[len(index) :])

    def pieces(self, part: str | None = None) -> tuple[str | None, ...]:
        """The smallest parts that ``part`` (None: the whole) is made of; (None,) for a slot without parts."""
        if part is not None and (not self.stack or "." in part):
            return (part,)
        blocks = [name for name, _ in self.parts]
        if not self.stack:
            return tuple(blocks) or (None,)
        numbers = [str(n) for n in self.stack] if part is None else [part]
        return tuple(f"{n}.{block}" for n in numbers for block in blocks) or tuple(numbers)
