"""Where the files of an engine's model are: of its weights, and of its tokenizer."""

from __future__ import annotations

from pathlib import Path

from hardpoint.checkpoint.source import resolve_model, resolve_tokenizer, tokenizer_location
from hardpoint.config import EngineConfig


def model_location(config: EngineConfig) -> Path:
    """The folder or file of the model, downloaded where it is a hub id; see resolve_model."""
    return resolve_model(config.model, config.hub_revision, config.download_dir, config.checkpoint_format)


def tokenizer_of(config: EngineConfig, model: Path) -> Path:
    """The folder or file of the tokenizer, which Tokenizer.load reads; ``model`` is the location of the model."""
    named = resolve_tokenizer(config.tokenizer, config.download_dir) if config.tokenizer else model
    return tokenizer_location(named, config.tokenizer_mode)
