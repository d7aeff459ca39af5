"""Constructor arguments of core's pluggable layers, and the weight slots that a layer declares.

They are dataclasses in this package, so that a plugin that replaces a layer needs no import from core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from hardpoint_plugin_api.errors import ConfigError
from hardpoint_plugin_api.quant import QuantSpec
from hardpoint_plugin_api.requests import Feature
from hardpoint_plugin_api.sharding import ShardPlan, joined

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
Scoring = Literal["softmax", "sigmoid"]


class LayerArgs(Protocol):
    """Constructor arguments of a layer that blocks build by name: ``layer`` is the name, the ``of`` of its
    contributions.

    A plugin that adds a mixer or a feed-forward defines a frozen dataclass with this attribute, like the ones below.
    """

    layer: ClassVar[str]


@dataclass(frozen=True)
class RopeArgs:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its context extensions.

    ``rotary_dim`` leading elements of a head are rotated.
    ``interleaved`` pairs (2i, 2i+1) instead of (i, i+d/2).
    ``scaling`` holds the numeric parameters of ``kind`` as they stand in a Hugging Face config; number N of a list has
    the name ``list.N``.
    """

    rotary_dim: int
    theta: float
    kind: RopeKind = "default"
    interleaved: bool = False
    scaling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class QueryScalingArgs:
    """Queries at position p are multiplied by ``1 + factor * ln(1 + floor((p + offset) / length))``, so that attention
    to long contexts stays as sharp as to short ones (arXiv:2501.19399).
    """

    length: int
    factor: float
    offset: int = 0


@dataclass(frozen=True)
class LinearArgs:
    """A linear layer. ``parts`` name the output features of a merged weight, in order: (("q", 512), ("k", 128), ...).

    ``kind`` distinguishes layers that quantization methods may treat differently: an output head, an output head that
    is tied to the embedding, and the router of a mixture of experts.

    ``row_shards`` (one per part) or ``column_shard`` say how a group of ranks divides the weight [out, in].
    ``row_shards`` divide the output features (column-parallel in Megatron's and vLLM's words): a rank computes its
    slice of the output. ``column_shard`` divides the input features (row-parallel there): a rank computes a partial sum
    of the whole output, and rank 0 adds the bias. ``in_features`` and ``parts`` describe the whole weight.
    """

    in_features: int
    parts: tuple[tuple[str, int], ...]
    bias: bool = False
    kind: Literal["linear", "lm_head", "embedding", "router"] = "linear"
    row_shards: tuple[ShardPlan, ...] = ()
    column_shard: ShardPlan | None = None

    @property
    def out_features(self) -> int:
        """The output features of the whole weight."""
        return sum(rows for _, rows in self.parts)

    @property
    def own_parts(self) -> tuple[tuple[str, int], ...]:
        """Each part of the weight, with its number of output features on this rank."""
        if not self.row_shards:
            return self.parts
        return tuple((name, plan.size) for (name, _), plan in zip(self.parts, self.row_shards, strict=True))

    @property
    def own_in_features(self) -> int:
        """The input features on this rank."""
        return self.in_features if self.column_shard is None else self.column_shard.size

    @property
    def features(self) -> frozenset[Feature]:
        """The workload features that an implementation must claim."""
        return frozenset({Feature.SHARDED} if self.row_shards or self.column_shard else ())


@dataclass(frozen=True)
class NormArgs:
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467).

    ``spec``: the quantization that all readers of the result want. The layer may then return ``Quantized``, or plain
    values.
    """

    size: int
    eps: float
    spec: QuantSpec | None = None


@dataclass(frozen=True)
class EmbeddingArgs:
    """A token embedding or an output head, [vocab_size, hidden_size]. ``tied``: both share one weight."""

    vocab_size: int
    hidden_size: int
    tied: bool = False


@dataclass(frozen=True)
class AttentionArgs:
    """Self-attention of a decoder: projections, optional per-head norm of q and k, rotary embedding, cache.

    ``window``, ``chunk``, ``soft_cap``, ``sinks`` and ``alibi`` are as in AttentionSpec. ``output_gate``: each element
    of each head's result is multiplied by the sigmoid of a gate (arXiv:2505.06708). The projection of queries then has
    2 ``head_size`` rows for each head: its query, and its gate. ``qk_norm_across_heads``: the elements of all query
    heads are normed together, each with a weight of its own, and those of all keys (OLMo 2, arXiv:2501.00656).
    Without ``qk_norm_weights`` the norm of q and k has no weight (Llama 4). ``query_scaling``: queries grow with their
    position, after norm and rotation.
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
    output_gate: bool = False
    qk_norm_across_heads: bool = False
    qk_norm_weights: bool = True
    query_scaling: QueryScalingArgs | None = None

    def __post_init__(self) -> None:
        if self.qk_norm_across_heads and not self.qk_norm_weights:
            raise ConfigError("a norm across heads has weights: qk_norm_across_heads needs qk_norm_weights")


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
        """The number of heads, the same for queries, keys and values."""
        return len(self.decays)


@dataclass(frozen=True)
class GatedDeltaNetArgs:
    """A gated delta net (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it.

    Queries and keys of ``num_key_heads`` heads [``key_size``] and values of ``num_heads`` heads [``value_size``] pass a
    causal convolution of each channel over ``conv_width`` tokens, with ``activation``. Queries and keys are divided by
    their length, queries also by the root of ``key_size``. Each head has a state [value_size, key_size], zero before
    the first token: it is multiplied by ``exp(-exp(rate) * softplus(a + step_bias))``, then ``sigmoid(b) * (v - S k)
    k^T`` is added, and the result is ``S q``. ``a`` and ``b`` are linear in the hidden state. A key head serves
    ``num_heads / num_key_heads`` heads that lie one after the other. Each head's result is normed (``norm_eps``), and
    multiplied by ``silu(z)``, where z is linear in the hidden state, before the last projection.
    """

    layer: ClassVar[str] = "gated_delta_net"

    hidden_size: int
    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int
    conv_width: int
    norm_eps: float = 1e-6
    activation: str = "silu"


@dataclass(frozen=True)
class KimiDeltaAttentionArgs:
    """Kimi Delta Attention (arXiv:2510.26692): a gated delta net in which each channel of a key has a decay.

    As GatedDeltaNetArgs, with ``num_heads`` heads of queries, keys and values [``head_size``]. Column c of a head's
    state is multiplied by ``exp(-exp(rate) * softplus(a_c + step_bias_c))``. ``a`` and the gate z are computed from
    vectors of ``gate_rank`` elements that are linear in the hidden state; results are multiplied by ``sigmoid(z)``.
    """

    layer: ClassVar[str] = "kimi_delta_attention"

    hidden_size: int
    num_heads: int
    head_size: int
    gate_rank: int
    conv_width: int
    norm_eps: float = 1e-5
    activation: str = "silu"


@dataclass(frozen=True)
class Mamba2Args:
    """A Mamba-2 mixer (arXiv:2405.21060), as in Bamba and Nemotron-H.

    Inputs x of ``num_heads`` heads [``head_size``], and B and C of ``num_groups`` groups [``state_size``], pass a
    causal convolution of each channel over ``conv_width`` tokens, with ``activation``. Each head has a state
    [head_size, state_size], zero before the first token, and a step ``max(min_step, softplus(dt + step_bias))``, where
    dt is linear in the hidden state. The state is multiplied by ``exp(-exp(rate) * step)``, then ``step * x B^T`` is
    added; the result is ``S C + skip * x``. A group serves ``num_heads / num_groups`` heads that lie one after the
    other. Results are multiplied by ``silu(z)``, where z is linear in the hidden state, and each group's are normed
    (``norm_eps``) before the last projection. ``bias``: both projections have one; ``conv_bias``: the convolution has
    one.
    """

    layer: ClassVar[str] = "mamba2"

    hidden_size: int
    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int
    norm_eps: float = 1e-5
    activation: str = "silu"
    bias: bool = False
    conv_bias: bool = True
    min_step: float = 0.0


@dataclass(frozen=True)
class SparseIndexerArgs:
    """The indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556): which positions each query reads.

    Each token has an index key [``head_size``], which ``num_heads`` index queries share. A position's score is the sum
    over heads of ``weight * relu(query . key)``. Keys and weights are computed from the hidden state, keys are normed
    (a layer norm with ``norm_eps``), queries are computed from the attention's compressed query [``query_rank``]. The
    first ``rope.rotary_dim`` elements of queries and keys rotate. The ``top_k`` highest positions are chosen.
    """

    layer: ClassVar[str] = "sparse_indexer"

    hidden_size: int
    query_rank: int
    num_heads: int
    head_size: int
    top_k: int
    rope: RopeArgs
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class MLAArgs:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): projections, norms, rotary embedding, cache.

    The cache holds, for each token, a normed latent [``latent_size``] and a rotated key [``rope_size``] that all heads
    share. Keys and values of a head are computed from the latent: the key has ``nope_size`` elements, the value
    ``value_size``. A query has ``nope_size`` elements for that key, and ``rope_size`` rotated elements for the shared
    one. ``scale`` multiplies scores. Queries are computed from a normed vector of ``query_rank`` elements, or from the
    hidden state where that is None. ``bias``: the projections from and to hidden states have one. ``norm_eps`` is that
    of both norms. ``rope.rotary_dim`` equals ``rope_size``; without a ``rope`` nothing is rotated.

    ``top_k``: each query reads at most that many positions, those that ``indexer`` chooses; without an ``indexer``,
    those that the nearest earlier layer's chose. None: each query reads all positions up to its own.
    """

    layer: ClassVar[str] = "mla"

    hidden_size: int
    num_heads: int
    latent_size: int
    rope_size: int
    nope_size: int
    value_size: int
    scale: float
    rope: RopeArgs | None
    query_rank: int | None = None
    bias: bool = False
    norm_eps: float = 1e-6
    top_k: int | None = None
    indexer: SparseIndexerArgs | None = None

    @property
    def features(self) -> frozenset[Feature]:
        """The workload features that an implementation must claim."""
        return frozenset() if self.top_k is None else frozenset({Feature.INDEX_LISTS})


@dataclass(frozen=True)
class MLPArgs:
    """A gated feed-forward, ``down(activation(gate(x)) * up(x))``; ungated, ``down(activation(up(x)))``."""

    layer: ClassVar[str] = "mlp"

    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class RouterArgs:
    """How the router of a mixture of experts chooses ``top_k`` experts for each token, and their weights.

    ``scoring`` turns logits into scores. ``bias``: a correction bias (float32, one per expert) is added to the scores,
    for the choice only (arXiv:2408.15664). ``num_groups`` above 1: the experts form that many groups of neighbours, and
    are chosen from a token's ``top_groups`` best groups (arXiv:2412.19437). ``renormalize`` divides a token's weights
    by their sum; ``scaling`` then multiplies them. ``linear_bias``: the linear layer that computes the logits has a
    bias.
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
        """The op that chooses experts, as workloads name it (``routing``)."""
        return "grouped_topk" if self.num_groups > 1 else f"topk_{self.scoring}"


@dataclass(frozen=True)
class MoEArgs:
    """A mixture of experts: each token passes ``router.top_k`` feed-forwards, whose results are summed by router
    weights.

    Experts are like ``MLPArgs``, each ``intermediate_size`` wide; ``bias``: both of their matrices have one.
    ``shared_size`` above 0: a gated feed-forward of that width serves every token as well (arXiv:2401.06066);
    ``shared_gate``: its result is multiplied by the sigmoid of one more linear output per token. ``swiglu_alpha`` and
    ``swiglu_limit`` are parameters of the activation ``swiglu_oai`` (arXiv:2508.10925): ``g * sigmoid(alpha * g) * (u +
    1)``, with the gate g at most ``limit`` and u within ``limit`` of zero. ``weights_on_input``: the router's weight
    multiplies an expert's input, not its result (Llama 4); a token's experts then run one after the other.
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
    weights_on_input: bool = False

    @property
    def experts_activation(self) -> str:
        """The activation between an expert's matrices, as workloads and manifests name it.

        Ungated: the name itself, such as ``relu2``. Gated: ``silu_and_mul`` and the like, where the first half of the
        columns gates the second. ``swiglu_oai`` has gpt-oss's parameters; with others the name is
        ``swiglu_oai(ALPHA,LIMIT)``.
        """
        if self.activation == "swiglu_oai":
            ours, theirs = (self.swiglu_alpha, self.swiglu_limit), (MoEArgs.swiglu_alpha, MoEArgs.swiglu_limit)
            return "swiglu_oai" if ours == theirs else f"swiglu_oai({self.swiglu_alpha},{self.swiglu_limit})"
        return f"{self.activation}_and_mul" if self.gated else self.activation


@dataclass(frozen=True)
class AdjustedArgs:
    """A sub-layer whose result is changed before it is added to the residual stream: normed, and then multiplied.

    ``inner`` is called as ``forward(x, step)``, [T, hidden] -> [T, hidden]. ``norm``: of its result, as in Gemma 2
    (arXiv:2408.00118); None: it is not normed. ``multiplier``: as Granite's ``residual_multiplier``.
    """

    layer: ClassVar[str] = "adjusted"

    inner: LayerArgs
    norm: NormArgs | None = None
    multiplier: float = 1.0


@dataclass(frozen=True)
class BlockArgs:
    """A decoder block: (x, residual) -> (x, residual).

    ``mixer`` combines the tokens of a sequence, as attention does. ``feed_forward`` transforms each token by itself, as
    an MLP or a mixture of experts does. Both are called as ``forward(x, step)``, [T, hidden] -> [T, hidden], and
    ``norm`` is applied before each. Without a ``feed_forward`` the block has one sub-layer, the mixer, of either kind.
    Without ``pre_norm`` sub-layers read the residual stream as it is (OLMo 2, arXiv:2501.00656), and the block has no
    weights of norms.
    """

    mixer: LayerArgs
    feed_forward: LayerArgs | None
    norm: NormArgs
    pre_norm: bool = True


@dataclass(frozen=True)
class StackArgs:
    """Consecutive decoder blocks: all of a model's, or those of one pipeline stage.

    The first of ``blocks`` is number ``first`` of the model's ``total`` blocks; ``total`` 0 means that the model has no
    others. Layer paths and weight names of a block contain its number in the model: ``blocks.NUMBER.mixer``.
    """

    layer: ClassVar[str] = "decoder_stack"

    blocks: tuple[BlockArgs, ...]
    first: int = 0
    total: int = 0

    @property
    def features(self) -> frozenset[Feature]:
        """The workload features that an implementation must claim."""
        return frozenset({Feature.PIPELINE_STAGES} if len(self.blocks) < self.total else ())


@dataclass(frozen=True)
class WeightSlot:
    """One weight tensor of a layer: its shape and dtype (name of a torch dtype) on this rank, before ``prepack``.

    ``parts`` name consecutive blocks along axis 0, which a checkpoint may store as separate tensors (q, k, v); empty:
    one unnamed part. ``shard_axis``: the axis that tensor parallelism divides; None: every rank holds the whole tensor.
    ``shards``: the plan of the division, one for each part where parts lie along that axis, else a single one.

    ``stack``: axis 0 stacks tensors of equal shape, such as the weights of experts with these numbers. A checkpoint may
    store each as a separate tensor: part ``"3"`` is number 3, without axis 0. ``parts`` are then blocks along axis 1,
    and ``"3.gate"`` is the part ``gate`` of number 3. ``stack_of``: the number of all such tensors, where other ranks
    hold the rest; 0: all are on this rank.
    """

    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    stack: tuple[int, ...] = ()
    shards: tuple[ShardPlan, ...] = ()
    stack_of: int = 0

    def shard(self, part: str | None) -> tuple[int, ShardPlan] | None:
        """Return the axis along which ``part`` (None: the whole) is divided, and its plan; None if undivided."""
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
        """Return the shape of ``part`` (None: the whole) in a checkpoint, including what other ranks hold."""
        shape, found = list(self.part_shape(part)), self.shard(part)
        if self.stack and part is None:
            shape[0] = self.stack_of or len(self.stack)
        if found is not None:
            axis, plan = found
            shape[axis - (len(self.shape) - len(shape))] = plan.full
        return tuple(shape)

    def is_elsewhere(self, part: str | None) -> bool:
        """Return True for a part whose number other ranks hold."""
        number = (part or "").partition(".")[0]
        return number.isdecimal() and int(number) < self.stack_of and int(number) not in self.stack

    def part_rows(self, part: str | None) -> tuple[int, int]:
        """Return start and length of ``part`` (None: the whole) along the axis of ``parts``."""
        if part is None:
            return 0, self.shape[1 if self.stack else 0]
        start = 0
        for name, rows in self.parts:
            if name == part:
                return start, rows
            start += rows
        raise KeyError(part)

    def part_index(self, part: str | None) -> tuple[int | slice, ...]:
        """Return the index of ``part`` (None: the whole) in the tensor. Raises KeyError for an unknown part."""
        if not self.shape:
            return ()
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
        """Return the parts of the weight that make up ``part`` (None: all parts); (None,) for a slot without parts."""
        if part is not None and (not self.stack or "." in part):
            return (part,)
        blocks = [name for name, _ in self.parts]
        if not self.stack:
            return tuple(blocks) or (None,)
        numbers = [str(n) for n in self.stack] if part is None else [part]
        return tuple(f"{n}.{block}" for n in numbers for block in blocks) or tuple(numbers)
