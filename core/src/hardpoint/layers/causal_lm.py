"""A decoder-only language model: embedding, blocks, norm, head; or the part of it that a pipeline stage has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import nn

from hardpoint.checkpoint.reading import Address, first_slot
from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer, sum_later
from hardpoint.layers.block_weights import block_weights
from hardpoint.layers.decoder_block import DecoderBlock
from hardpoint.layers.embedding import Embedding, LMHead
from hardpoint.layers.norm import Norm
from hardpoint.parallel.stages import StageDivision
from hardpoint_plugin_api import BlockArgs, EmbeddingArgs, ForwardStep, NormArgs, StackArgs


class DecoderStack(PluggableLayer, name="decoder_stack"):
    """The blocks of a model, or of a stage of it, one after the other: a vendor's whole-model kernel takes its place.

    ``blocks`` are by their numbers in the model.
    """

    def __init__(self, ctx: Context, args: StackArgs) -> None:
        super().__init__(ctx)
        numbered = enumerate(args.blocks, args.first)
        blocks = {str(i): DecoderBlock(ctx.child(f"blocks.{i}"), block) for i, block in numbered}
        if type(self).forward is DecoderStack.forward:  # another may read what blocks return
            for (_, block), (i, following) in pairwise(blocks.items()):
                sum_later(ctx.child(f"blocks.{i}"), block, following)
        self.blocks = nn.ModuleDict(blocks)

    def return_partial_sums(self) -> bool:
        return cast(DecoderBlock, list(self.blocks.values())[-1]).return_partial_sums()

    def forward(
        self, x: torch.Tensor, step: ForwardStep, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x, residual [T, hidden] -> x, residual; their sum is the stream. A model's first block gets no residual."""
        for block in self.blocks.values():
            x, residual = block(x, residual, step)
        return x, residual


@dataclass(frozen=True)
class ModelFacts:
    """Facts that an engine needs of a model before it is built.

    Token ids are below ``vocab_size``; the residual stream is ``hidden_size`` numbers wide. Sequences have at most
    ``max_positions`` tokens unless the user asks for more, and ``most_positions`` then; ``limit`` says in words where
    the latter number stands, for messages.
    """

    vocab_size: int
    max_positions: int
    most_positions: int
    limit: str
    hidden_size: int


@dataclass(frozen=True)
class CausalLMArgs:
    """A decoder-only model, as a family makes it of a checkpoint's config.

    ``weight_names`` has the slot of each tensor of the checkpoint, None for one that may be there and is not needed;
    ``MODULE.*`` means all tensors within a module. Embeddings are multiplied by ``embedding_multiplier``, rounded to
    the model's dtype. Logits are multiplied by ``logits_multiplier``; with a ``logits_soft_cap`` c they become
    ``c * tanh(logits / c)`` (Gemma 2, arXiv:2408.00118).
    """

    embedding: EmbeddingArgs
    blocks: tuple[BlockArgs, ...]
    norm: NormArgs
    tied: bool
    weight_names: Mapping[str, Address | None]
    facts: ModelFacts
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None

    def build(self, ctx: Context) -> CausalLM:
        """Construct the model, without weights."""
        return CausalLM(ctx, self)


class CausalLM(nn.Module):
    """Token ids to hidden states to logits, or the part of a pipeline stage.

    The first stage has the embedding, the last one norm and head; both hold a weight that is tied. A stage hands on the
    *states* of T tokens, [2, T, hidden]: the last block's result, and the residual to add it to.
    ``weight_names`` are those of the arguments, quantization considered, without weights of other stages.
    ``module_names`` has the address of each module's weight, as ``weight_names`` has it of a tensor without
    quantization; None for a module of another stage. ``division``: how stages divide the blocks. ``notes``: lines about
    how it was built, for ``explain``.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, ctx: Context, args: CausalLMArgs) -> None:
        super().__init__()
        self.args = args
        ctx, stages = ctx.for_model(args.weight_names), ctx.parallel.pp
        is_first, is_last = stages.rank == 0, stages.rank == stages.size - 1
        self.division = _division(ctx, args)
        blocks = self.division.blocks(len(args.blocks), stages)
        if stages.size > 1:
            self.notes = (self.division.words(len(args.blocks), stages.size),)
        if is_last or (is_first and args.tied):
            self.head = LMHead(ctx.child("head"), replace(args.embedding, tied=args.tied))
        if is_first:
            self.embedding = Embedding(ctx.child("embedding"), args.embedding, self.head if args.tied else None)
        own = StackArgs(args.blocks[blocks.start : blocks.stop], blocks.start, len(args.blocks))
        self.stack = DecoderStack(ctx.child("stack"), own)
        if is_last:
            self.norm = Norm(ctx.child("norm"), args.norm)
            sum_later(ctx.child("norm"), self.stack, self.norm)
        self._embedding_multiplier = float(torch.tensor(args.embedding_multiplier, dtype=ctx.dtype))
        self._logits_multiplier, self._logits_soft_cap = args.logits_multiplier, args.logits_soft_cap
        self._begin = self._embedded if is_first else _received
        self._end = self._normed if is_last else _handed_on
        names = _without_other_stages(args.weight_names, frozenset(self._modules), blocks)
        self.weight_names = ctx.quantization.weight_names(names)
        modules = {name for name, address in args.weight_names.items() if address is not None}
        self.module_names = {
            name.removesuffix(".weight"): place
            for name, place in names.items()
            if name in modules and name.endswith(".weight")
        }

    def hidden(self, inputs: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """ids int64 [T], or the states of the stage before, -> hidden states [T, hidden], or states to hand on."""
        x, *residual = self._begin(inputs)
        return self._end(*self.stack(x, step, *residual))

    def _embedded(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x: torch.Tensor = self.embedding(ids)
        return (x if self._embedding_multiplier == 1.0 else x * self._embedding_multiplier,)

    def _normed(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def compile_pass(self) -> bool:
        """Compile the forward pass; the weights are there. False where the code calls fused kernels anyway."""
        return False

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab], for the rows that are wanted only."""
        logits: torch.Tensor = self.head(hidden)
        if self._logits_multiplier != 1.0:
            logits = logits * self._logits_multiplier
        if self._logits_soft_cap is not None:
            logits = torch.tanh(logits / self._logits_soft_cap) * self._logits_soft_cap
        return logits


def _division(ctx: Context, args: CausalLMArgs) -> StageDivision:
    """How blocks are divided among pipeline stages."""
    numbers = ctx.config.pipeline_parallel_layers
    tensors = ctx.headers() if ctx.parallel.pp.size > 1 and not numbers else None
    if tensors is None:
        return StageDivision(numbers)
    return StageDivision(weights=block_weights(args.weight_names, args.blocks, tensors, tied=args.tied))


def _received(states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x, residual of ``states``, which stay as they are: layers may write to the residual."""
    return states[0], states[1].clone()


def _handed_on(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return torch.stack((x, torch.zeros_like(x) if residual is None else residual))


def _without_other_stages(
    names: Mapping[str, Address | None], modules: frozenset[str], blocks: range
) -> dict[str, Address | None]:
    """``names`` with None for all tensors of modules that are not in this stage, however these are quantized."""
    found: dict[str, Address | None] = {}
    for name, address in names.items():
        root, _, rest = first_slot(address or "").partition(".")
        number = rest.removeprefix("blocks.").partition(".")[0]
        if address is None or (int(number) in blocks if root == "stack" else root in modules):
            found[name] = address
        else:
            found |= {name: None, f"{name.rpartition('.')[0]}.*": None}
    return found
