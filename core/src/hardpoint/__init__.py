"""Hardpoint: an LLM inference platform whose hardware support is plugged in.

Importing this package resolves nothing: no platform, no plugin, no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.config import EngineArgs
    from hardpoint.engine.async_engine import AsyncEngine
    from hardpoint.engine.beam_search import BeamSearchParams
    from hardpoint.engine.frontend.prompts import TextPrompt, TokensPrompt
    from hardpoint.engine.llm import LLM
    from hardpoint.engine.lora import LoRARequest
    from hardpoint.engine.outputs import CompletionOutput, RequestOutput, RequestOutputKind
    from hardpoint.engine.sampling_params import SamplingParams
    from hardpoint.engine.structured_outputs import StructuredOutputsParams
    from hardpoint.layers.base import PluggableLayer
    from hardpoint.ops.base import CustomOp, custom_op

__version__ = "0.2.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "CustomOp",
    "EngineArgs",
    "LoRARequest",
    "PluggableLayer",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "custom_op",
]

_HOMES = {
    "LLM": "hardpoint.engine.llm",
    "AsyncEngine": "hardpoint.engine.async_engine",
    "BeamSearchParams": "hardpoint.engine.beam_search",
    "CompletionOutput": "hardpoint.engine.outputs",
    "CustomOp": "hardpoint.ops.base",
    "EngineArgs": "hardpoint.config",
    "LoRARequest": "hardpoint.engine.lora",
    "PluggableLayer": "hardpoint.layers.base",
    "RequestOutput": "hardpoint.engine.outputs",
    "RequestOutputKind": "hardpoint.engine.outputs",
    "SamplingParams": "hardpoint.engine.sampling_params",
    "StructuredOutputsParams": "hardpoint.engine.structured_outputs",
    "TextPrompt": "hardpoint.engine.frontend.prompts",
    "TokensPrompt": "hardpoint.engine.frontend.prompts",
    "custom_op": "hardpoint.ops.base",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that importing the package stays free of torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hardpoint' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
