"""Layers that the kit tries, by name: arguments, inputs and a call for each of core's.

Axes: T tokens, n hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from hardpoint.conformance.families.certain_routing import certain_tokens, correction_bias, router_weight
from hardpoint.conformance.families.step_memory import Pieces
from hardpoint.conformance.families.steps import Piece
from hardpoint.layers.base import PluggableLayer
from hardpoint_plugin_api import (
    AdjustedArgs,
    AttentionArgs,
    BlockArgs,
    EmbeddingArgs,
    ForwardStep,
    GatedDeltaNetArgs,
    KimiDeltaAttentionArgs,
    LinearArgs,
    LinearAttentionArgs,
    Mamba2Args,
    MLAArgs,
    MLPArgs,
    MoEArgs,
    NormArgs,
    QueryScalingArgs,
    RopeArgs,
    RouterArgs,
    SparseIndexerArgs,
    StackArgs,
)

Inputs = Mapping[str, torch.Tensor]
Steps = Callable[[], Iterator[tuple[slice, ForwardStep]]]


@dataclass(frozen=True)
class LayerKind:
    """Facts of one named layer that the kit tries.

    ``variations`` are constructor arguments by name; ``draw(args, tokens, generator)`` makes inputs, float32 on the
    host; ``forward(layer, inputs, steps)`` calls it. ``pieces`` are the steps of a layer that uses a cache, such as
    ``STEPS``: its results are [T, ...], and what the default layer gives for each request by itself, in one step, is
    right. ``without_drafts`` are the variations that take no steps with drafts. ``weights(args)`` are those that must
    not be random, by the path of their slot. ``mutates`` and ``aliases`` are what the layer's contract allows.
    """

    variations: Mapping[str, Any]
    draw: Callable[[Any, int, torch.Generator], dict[str, torch.Tensor]]
    forward: Callable[[PluggableLayer, Inputs, Steps], object]
    weights: Callable[[Any], Mapping[str, torch.Tensor]] = lambda args: {}
    tokens: Sequence[int] = (1, 7, 33)
    pieces: Pieces = ()
    without_drafts: Collection[str] = ()
    aliases: frozenset[tuple[int, str]] = frozenset()


def _hidden(args: Any, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    size = getattr(args, "hidden_size", None) or getattr(args, "in_features", None) or args.size
    return {"x": torch.randn(tokens, size, generator=generator)}


def _tokens(args: Any, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """For layers that take a step and keep nothing in a cache: the tokens of one sequence."""
    return _hidden(args, tokens, generator) | {"positions": torch.arange(tokens)}


def _hidden_and_residual(args: NormArgs, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: torch.randn(tokens, args.size, generator=generator) for name in ("x", "residual")}


def _ids(args: EmbeddingArgs, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, args.vocab_size, (tokens,), generator=generator)}


def _stream(args: Any, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    block: BlockArgs = args
    return {"x": torch.randn(tokens, block.norm.size, generator=generator)}


def _stack_stream(args: StackArgs, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A pipeline stage behind another gets a residual as well."""
    names = ("x", "residual") if args.first else ("x",)
    return {name: torch.randn(tokens, args.blocks[0].norm.size, generator=generator) for name in names}


def _on_x(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    return layer(inputs["x"])


def _in_a_step(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    return layer(inputs["x"], ForwardStep(inputs["positions"], inputs["positions"], (), ()))


def _on_ids(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    return layer(inputs["ids"])


def _norm_both_ways(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    alone, stream = layer(inputs["x"])
    return alone, stream.clone(), *layer(inputs["x"].clone(), inputs["residual"])


def _routed(args: MoEArgs, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": certain_tokens(args, tokens, generator), "positions": torch.arange(tokens)}


def _routing(args: MoEArgs) -> dict[str, torch.Tensor]:
    bias = {"correction_bias": correction_bias(args.router)} if args.router.bias else {}
    return {"router.weight": router_weight(args), **bias}


def step_by_step(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    """Call a layer that uses a cache, of one input ``x`` [T, n]."""
    return torch.cat([layer(inputs["x"][rows], step) for rows, step in steps()])


def _hidden_and_compressed(args: SparseIndexerArgs, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    sizes = {"x": args.hidden_size, "compressed": args.query_rank}
    return {name: torch.randn(tokens, size, generator=generator) for name, size in sizes.items()}


def _lists_step_by_step(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    """The lists of all steps, as numbers of x's dtype: the positions of the steps here are small."""
    found = []
    for rows, step in steps():
        x, compressed, args = inputs["x"][rows], inputs["compressed"][rows], cast(SparseIndexerArgs, layer.args)
        lists = torch.full((len(x), args.top_k), -2, dtype=torch.int32, device=x.device)
        layer(x, compressed, step, lists)
        found.append(lists.to(x.dtype))
    return torch.cat(found)


def _blocks_step_by_step(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    """The stream is compared: how it is divided between ``x`` and ``residual`` is the layer's own affair."""
    results = []
    for rows, step in steps():
        residuals = (inputs[name][rows].clone() for name in inputs if name == "residual")
        x, residual = layer(inputs["x"][rows].clone(), step, *residuals)
        results.append(x if residual is None else x + residual)
    return torch.cat(results)


def _block_step_by_step(layer: PluggableLayer, inputs: Inputs, steps: Steps) -> object:
    """As the first block of a stack, which gets no residual, and as another."""
    x = inputs["x"]
    first = [sum(layer(x[rows].clone(), None, step)) for rows, step in steps()]
    other = [sum(layer(x[rows].clone(), x[rows] * 0.5, step)) for rows, step in steps()]
    return torch.cat(first), torch.cat(other)


_NOT_YET = Piece(0, 0)
STEPS = (
    (Piece(16, 16), Piece(5, 5), Piece(9, 9), _NOT_YET, _NOT_YET),
    (Piece(1, 17), Piece(1, 6), Piece(11, 20), _NOT_YET, _NOT_YET),
    (Piece(1, 18), Piece(0, 6), Piece(1, 21), Piece(4, 20), _NOT_YET),
    (Piece(1, 19), Piece(1, 7), Piece(1, 22), Piece(1, 21), Piece(1, 1)),
    (Piece(1, 20), Piece(1, 8), Piece(1, 23), Piece(1, 22), Piece(1, 2)),
)
"""Steps of pages of 16 tokens: prompts; decodes beside the rest of a prompt; a request that begins with what another
left in the cache, while one pauses; decodes, among them the only token of a prompt."""
NUM_STEP_TOKENS = sum(piece.query for pieces in STEPS for piece in pieces)
_ROPE = RopeArgs(rotary_dim=32, theta=10_000.0)
_ATTENTION = AttentionArgs(64, 4, 2, 32, 0.2, rope=_ROPE)
_MLA = MLAArgs(64, 4, 24, 8, 12, 10, 0.2, rope=replace(_ROPE, rotary_dim=8, interleaved=True), query_rank=20)
_INDEXER = SparseIndexerArgs(64, 20, 5, 24, 6, rope=replace(_ROPE, rotary_dim=8))
_MLP, _NORM = MLPArgs(64, 96), NormArgs(64, 1e-6)
_TWO_BLOCKS = (BlockArgs(_ATTENTION, _MLP, _NORM), BlockArgs(replace(_ATTENTION, window=6), _MLP, _NORM))
_MOE = MoEArgs(64, 48, RouterArgs(8, 2, renormalize=True))
_BIASED = RouterArgs(8, 3, "sigmoid", bias=True, renormalize=True, scaling=2.5)


KINDS: dict[str, LayerKind] = {
    "norm": LayerKind(
        {"plain": _NORM, "odd": NormArgs(129, 1e-5), "wide": NormArgs(2048, 1e-6)},
        _hidden_and_residual,
        _norm_both_ways,
        aliases=frozenset({(2, "residual"), (3, "residual")}),
    ),
    "linear": LayerKind(
        {
            "plain": LinearArgs(64, (("out", 96),)),
            "merged-bias": LinearArgs(64, (("q", 64), ("k", 32), ("v", 32)), bias=True),
            "odd": LinearArgs(33, (("out", 17),), bias=True),
        },
        _tokens,
        _in_a_step,
    ),
    "mlp": LayerKind(
        {
            "plain": _MLP,
            "gelu": replace(_MLP, activation="gelu_tanh"),
            "ungated-bias": replace(_MLP, activation="relu2", gated=False, bias=True),
            "odd": MLPArgs(33, 57),
        },
        _tokens,
        _in_a_step,
    ),
    "moe": LayerKind(
        {
            "plain": _MOE,
            "shared": replace(_MOE, router=RouterArgs(8, 2), shared_size=80, shared_gate=True),
            "sigmoid-bias": replace(_MOE, router=_BIASED, shared_size=80),
            "groups": replace(_MOE, router=replace(_BIASED, num_experts=16, num_groups=4, top_groups=2)),
            "softmax-groups": replace(_MOE, router=RouterArgs(16, 2, num_groups=4, top_groups=2, scaling=16.0)),
            "weights-on-input": replace(
                _MOE, router=RouterArgs(8, 2, "sigmoid"), shared_size=80, weights_on_input=True
            ),
            "ungated-odd": MoEArgs(33, 17, RouterArgs(5, 1), activation="relu2", gated=False),
        },
        _routed,
        _in_a_step,
        weights=_routing,
    ),
    "embedding": LayerKind({"plain": EmbeddingArgs(97, 64), "odd": EmbeddingArgs(31, 33)}, _ids, _on_ids),
    "lm_head": LayerKind({"plain": EmbeddingArgs(97, 64), "odd": EmbeddingArgs(31, 33)}, _hidden, _on_x),
    "attention": LayerKind(
        {
            "plain": _ATTENTION,
            "normed-bias": replace(_ATTENTION, qkv_bias=True, out_bias=True, qk_norm_eps=1e-6),
            "window": replace(_ATTENTION, window=6),
            "chunk": replace(_ATTENTION, chunk=8),
            "sinks-capped": replace(_ATTENTION, sinks=True, soft_cap=2.0),
            "alibi": replace(_ATTENTION, alibi=True, rope=None),
            "interleaved-partial": replace(_ATTENTION, rope=replace(_ROPE, rotary_dim=16, interleaved=True)),
            "gated-bias": replace(_ATTENTION, output_gate=True, qkv_bias=True),
            "normed-across-heads": replace(_ATTENTION, qk_norm_eps=1e-6, qk_norm_across_heads=True),
            "normed-without-weights": replace(_ATTENTION, qk_norm_eps=1e-6, qk_norm_weights=False),
            "growing-queries": replace(_ATTENTION, query_scaling=QueryScalingArgs(5, 0.7, offset=1)),
        },
        _hidden,
        step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
    "mla": LayerKind(
        {
            "plain": _MLA,
            "uncompressed-bias": replace(_MLA, query_rank=None, bias=True),
            "without-positions": replace(_MLA, rope=None),
            "odd": MLAArgs(33, 3, 20, 6, 5, 7, 0.3, rope=replace(_ROPE, rotary_dim=6), query_rank=9),
            "large-latent": replace(_MLA, latent_size=64, nope_size=4, value_size=6),  # cheap to make keys of
            "sparse": replace(_MLA, top_k=6, indexer=_INDEXER),
        },
        _hidden,
        step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
        without_drafts=("sparse",),  # see sparse_indexer
    ),
    "sparse_indexer": LayerKind(
        {
            "plain": _INDEXER,
            "interleaved": replace(_INDEXER, rope=replace(_INDEXER.rope, interleaved=True), head_size=32, top_k=1),
            "odd": SparseIndexerArgs(33, 9, 3, 13, 16, rope=replace(_ROPE, rotary_dim=6)),
            "all": replace(_INDEXER, num_heads=16, head_size=256, top_k=100),
        },
        _hidden_and_compressed,
        _lists_step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
        # Nearly equal scores are ordered by their roundings: each further row may be a false alarm.
        without_drafts=("plain", "interleaved", "odd", "all"),
    ),
    "linear_attention": LayerKind(
        {
            "plain": LinearAttentionArgs(64, 16, (0.5, 0.9, 0.97, 1.0), 0.25),
            "odd": LinearAttentionArgs(33, 5, (0.0, 0.8, 0.99)),
        },
        _hidden,
        step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
    "gated_delta_net": LayerKind(
        {
            "plain": GatedDeltaNetArgs(64, 4, 2, 16, 24, 4),
            "one-key-head": GatedDeltaNetArgs(64, 6, 1, 32, 16, 2, norm_eps=1e-5, activation="gelu"),
            "odd": GatedDeltaNetArgs(33, 3, 3, 5, 7, 6),
        },
        _hidden,
        step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
    "kimi_delta_attention": LayerKind(
        {
            "plain": KimiDeltaAttentionArgs(64, 4, 16, 24, 4),
            "odd": KimiDeltaAttentionArgs(33, 3, 7, 5, 3, norm_eps=1e-6, activation="gelu"),
        },
        _hidden,
        step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
    "mamba2": LayerKind(
        {
            "plain": Mamba2Args(64, 8, 16, 2, 24, 4, bias=True),
            "one-group-clamped": Mamba2Args(64, 6, 32, 1, 16, 2, conv_bias=False, min_step=0.5),
            "odd": Mamba2Args(33, 3, 7, 3, 5, 6, norm_eps=1e-6),
        },
        _hidden,
        step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
    "adjusted": LayerKind(
        {
            "normed": AdjustedArgs(_MLP, _NORM),
            "multiplied": AdjustedArgs(_ATTENTION, multiplier=0.22),
            "both-odd": AdjustedArgs(MLPArgs(33, 57), NormArgs(33, 1e-5), 1.5),
        },
        lambda args, tokens, generator: _hidden(args.inner, tokens, generator),
        step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
    "decoder_block": LayerKind(
        {
            "plain": BlockArgs(_ATTENTION, _MLP, _NORM),
            "window": BlockArgs(replace(_ATTENTION, window=6), _MLP, _NORM),
            "one": BlockArgs(_ATTENTION, None, _NORM),
            "not-normed": BlockArgs(_ATTENTION, _MLP, _NORM, pre_norm=False),
        },
        _stream,
        _block_step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
    "decoder_stack": LayerKind(
        {"two": StackArgs(_TWO_BLOCKS), "stage": StackArgs(_TWO_BLOCKS, first=3, total=7)},
        _stack_stream,
        _blocks_step_by_step,
        tokens=(NUM_STEP_TOKENS,),
        pieces=STEPS,
    ),
}
"""Core's layers by name."""
