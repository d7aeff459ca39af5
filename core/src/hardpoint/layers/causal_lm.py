"""A decoder-only language model: embedding, blocks, norm, head. Model files say of what shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import nn

from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer, sum_later
from hardpoint.layers.decoder_block import DecoderBlock
from hardpoint.layers.embedding import Embedding, LMHead
from hardpoint.layers.norm import Norm
from hardpoint_plugin_api import BlockArgs, EmbeddingArgs, ForwardStep, NormArgs


class DecoderStack(PluggableLayer, name="decoder_stack"):
    """The blocks of a model, one after the other: a vendor's whole-model kernel takes its place."""

    def __init__(self, ctx: Context, args: tuple[BlockArgs, ...]) -> None:
        super().__init__(ctx)
        blocks = [DecoderBlock(ctx.child(f"blocks.{i}"), block) for i, block in enumerate(args)]
        if type(self).forward is DecoderStack.forward:  # another may read what blocks return
            for i, (block, following) in enumerate(pairwise(blocks), 1):
                sum_later(ctx.child(f"blocks.{i}"), block, following)
        self.blocks = nn.ModuleList(blocks)

    def leave_summand(self) -> bool:
        return cast(DecoderBlock, self.blocks[-1]).leave_summand()

    def forward(self, x: torch.Tensor, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, hidden] -> x, residual; their sum is the stream."""
        residual = None
        for block in self.blocks:
            x, residual = block(x, residual, step)
        return x, residual


@dataclass(frozen=True)
class ModelFacts:
    """Facts that an engine needs of a model before it is built.

    Token ids are below ``vocab_size``. Sequences have at most ``max_positions`` tokens unless the user asks for more,
    and ``most_positions`` then; ``limit`` says in words where the latter number stands, for messages.
    """

    vocab_size: int
    max_positions: int
    most_positions: int
    limit: str


@dataclass(frozen=True)
class CausalLMArgs:
    """A decoder-only model, as a family makes it of a checkpoint's config.

    ``weight_names`` has the slot of each tensor of the checkpoint, None for one that may be there and is not needed.
    """

    embedding: EmbeddingArgs
    blocks: tuple[BlockArgs, ...]
    norm: NormArgs
    tied: bool
    weight_names: Mapping[str, str | None]
    facts: ModelFacts

    def build(self, ctx: Context) -> CausalLM:
        """Construct the model, without weights."""
        return CausalLM(ctx, self)


class CausalLM(nn.Module):
    """Token ids to hidden states to logits. ``weight_names`` are those of the arguments, quantization considered."""

    def __init__(self, ctx: Context, args: CausalLMArgs) -> None:
        super().__init__()
        ctx = ctx.for_model(args.weight_names)
        self.head = LMHead(ctx.child("head"), replace(args.embedding, tied=args.tied))
        self.embedding = Embedding(ctx.child("embedding"), args.embedding, self.head if args.tied else None)
        self.stack = DecoderStack(ctx.child("stack"), args.blocks)
        self.norm = Norm(ctx.child("norm"), args.norm)
        sum_later(ctx.child("norm"), self.stack, self.norm)
        self.weight_names = ctx.quantization.weight_names(args.weight_names)

    def hidden(self, ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """ids int64 [T] -> hidden states [T, hidden]."""
        x, residual = self.stack(self.embedding(ids), step)
        hidden: torch.Tensor = self.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab], for the rows that are wanted only."""
        logits: torch.Tensor = self.head(hidden)
        return logits
