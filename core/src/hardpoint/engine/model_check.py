"""Checks of a model that need neither weights nor a device: a server makes them before it opens its port."""

from __future__ import annotations

from pathlib import Path

from hardpoint.checkpoint.checkpoint import Checkpoint
from hardpoint.checkpoint.source import is_hub_id, resolve_config, resolve_tokenizer, tokenizer_location
from hardpoint.config import EngineConfig
from hardpoint.models.family import known_architecture
from hardpoint.plugin_host import LockFile, discover
from hardpoint.tokenizer.tokenizer import check_tokenizer_files


def check_model(config: EngineConfig) -> None:
    """Raise CheckpointError or UnknownNameError where ``config`` names a model that is missing or unknown.

    Looks for the folder or hub id, its architecture, and the files of a local tokenizer. Of a hub id only config.json
    is downloaded.
    """
    folder = resolve_config(config.model, config.hub_revision, config.download_dir, config.checkpoint_format)
    lock = LockFile.read(Path(config.plugins_lock_file)) if config.plugins_locked else None
    known_architecture(Checkpoint.read(folder), discover(config.plugins, lock))
    named = config.tokenizer or config.model
    if not config.skip_tokenizer_init and not is_hub_id(named):
        check_tokenizer_files(tokenizer_location(resolve_tokenizer(named), config.tokenizer_mode))
