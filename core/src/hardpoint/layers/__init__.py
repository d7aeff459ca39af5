"""Pluggable layers: what models are built from, and what a plugin may replace by name."""

from hardpoint.layers.adjusted import Adjusted
from hardpoint.layers.attention import Attention
from hardpoint.layers.base import PluggableLayer, build_layer
from hardpoint.layers.causal_lm import CausalLM, CausalLMArgs, DecoderStack, ModelFacts
from hardpoint.layers.decoder_block import DecoderBlock
from hardpoint.layers.embedding import Embedding, LMHead
from hardpoint.layers.gated_delta_net import GatedDeltaNet
from hardpoint.layers.kimi_delta import KimiDeltaAttention
from hardpoint.layers.linear import Linear
from hardpoint.layers.linear_attention import LinearAttention
from hardpoint.layers.mamba2 import Mamba2
from hardpoint.layers.mla import MLA
from hardpoint.layers.mlp import MLP
from hardpoint.layers.moe import Experts, MoE
from hardpoint.layers.norm import Norm
from hardpoint.layers.sparse_indexer import SparseIndexer

__all__ = [
    "Adjusted",
    "Attention",
    "CausalLM",
    "CausalLMArgs",
    "DecoderBlock",
    "DecoderStack",
    "Embedding",
    "Experts",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LMHead",
    "Linear",
    "LinearAttention",
    "MLA",
    "MLP",
    "Mamba2",
    "MoE",
    "ModelFacts",
    "Norm",
    "PluggableLayer",
    "SparseIndexer",
    "build_layer",
]
