"""``EngineArgs``: vLLM's way to write the settings of an engine."""

from __future__ import annotations

from typing import Any

from hardpoint.config.engine_config import EngineConfig


class EngineArgs:
    """The keywords of LLM, kept until an engine is made of them. vLLM's AsyncEngineArgs is the same class."""

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self.settings = {"model": model, **settings}

    def create_engine_config(self) -> EngineConfig:
        """Return them as an EngineConfig. Raises what ``EngineConfig.create`` does."""
        return EngineConfig.create(**self.settings)
