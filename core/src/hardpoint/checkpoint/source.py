"""Where a model is: a local folder or GGUF file, the embedded demo model, or a hub id."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

from hardpoint.checkpoint.checkpoint import OWN_FILE
from hardpoint.checkpoint.formats import is_checkpoint_file, open_files
from hardpoint.checkpoint.gguf.choice import choose_file, file_patterns, gguf_files
from hardpoint.checkpoint.mistral_files import PARAMS, STEM
from hardpoint.checkpoint.tekken import TEKKEN
from hardpoint_plugin_api import CheckpointError

DEMO = "demo"
"""The name of the embedded demo model, the default of every command that takes a model."""


Kind = Literal["model", "tokenizer", "adapter"]
Format = Literal["auto", "hf", "mistral"]
"""Of a folder with the files of both: Hugging Face's, or Mistral AI's own. auto: Hugging Face's where it has them."""
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "spiece.model", "vocab.txt", "merges.txt")
"""Files to download of a repository, as patterns."""
_MISTRAL_FILES = ("*.json", f"{STEM}*.safetensors", "*.jinja")

_REMEDIES: dict[Kind, str] = {
    "model": "give the folder of a Hugging Face checkpoint, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B",
    "tokenizer": "give a folder with a tokenizer.json, or a hub id such as Qwen/Qwen3-0.6B",
    "adapter": "give the folder of a LoRA adapter as PEFT saves it, or its hub id",
}
"""Remedies, by kind."""


def demo_model() -> Path:
    """The folder of the demo model that ships with core."""
    return Path(str(files("hardpoint"))) / "demo_model"


def resolve_model(
    model: str, revision: str | None = None, download_dir: str | None = None, form: Format = "auto"
) -> Path:
    """Return the local folder or file of ``model``: ``"demo"``, a folder with a config.json, a GGUF file, or a hub id
    (downloaded once).

    Of a folder, or a hub's repository, with several GGUF files ``FOLDER:Q4_K_M`` means the one with that in its name.
    ``download_dir`` is the folder for downloads, None for the hub's own cache. Raises CheckpointError for a path that
    does not exist or holds no model of the format, and for a hub id that cannot be had.
    """
    return _with_config(model, revision, download_dir, form, _MISTRAL_FILES if form == "mistral" else _FILES)


def resolve_config(
    model: str, revision: str | None = None, download_dir: str | None = None, form: Format = "auto"
) -> Path:
    """Return a folder with the config.json of ``model``, or its GGUF file; of a hub id only this file is downloaded.
    The params.json of Mistral's own format stands for a config.json.

    Raises what ``resolve_model`` does, which needs more of a hub id.
    """
    files = (PARAMS,) if form == "mistral" else ("config.json", OWN_FILE, PARAMS)
    return _with_config(model, revision, download_dir, form, files)


def is_hub_id(name: str) -> bool:
    """Whether ``name`` is looked for on the hub: it is no folder here, and written like a hub id."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not os.path.exists(name)


def _with_config(
    model: str, revision: str | None, download_dir: str | None, form: Format, files: Sequence[str]
) -> Path:
    name, quant = split_quant(model)
    files = file_patterns(quant) if quant else files
    found = demo_model() if model == DEMO else _resolve("model", name, revision, download_dir, files)
    if form == "mistral":
        return _file_of_mistral(found, PARAMS, "config-format")
    if form == "hf" and found.is_dir() and not (found / "config.json").is_file():
        raise CheckpointError(f"{found} holds no config.json, which --config-format hf asks for; leave it out")
    if found.is_dir() and (quant or not open_files(found).has("config.json")) and gguf_files(found):
        return choose_file(found, quant)
    if not open_files(found).has("config.json"):
        if form == "auto" and (found / PARAMS).is_file():
            return found / PARAMS  # without weights, which may not have been downloaded
        raise CheckpointError(
            f"{found} holds no config.json; give the folder of a Hugging Face checkpoint, or a GGUF file"
        )
    return found


def split_quant(model: str) -> tuple[str, str | None]:
    """``"FOLDER:Q4_K_M"`` -> the folder or hub id, and a part of a file's name; None where none is asked for."""
    name, colon, quant = model.rpartition(":")
    if not colon or not quant or "/" in quant or os.path.exists(os.path.expanduser(model)):
        return model, None
    return name, quant


def resolve_tokenizer(model: str, download_dir: str | None = None) -> Path:
    """Return the local folder or file of a tokenizer, by the names of ``resolve_model``; it needs no config.json."""
    name, quant = split_quant(model)
    if quant:
        return resolve_model(model, None, download_dir)
    found = demo_model() if model == DEMO else _resolve("tokenizer", name, None, download_dir)
    others = gguf_files(found) if found.is_dir() and not any(found.glob("*token*")) else []
    return choose_file(found, None) if others else found


def tokenizer_location(folder: Path, mode: Format) -> Path:
    """The place of the tokenizer of a checkpoint, or of a folder with a tokenizer alone: ``folder`` itself, or the
    tekken.json in it. Raises CheckpointError where ``mode`` asks for a file that is not there.
    """
    if mode == "mistral":
        return _file_of_mistral(folder, TEKKEN, "tokenizer-mode")
    base = folder.parent if folder.name == PARAMS else folder
    is_needed = mode == "auto" and not (base / "tokenizer.json").is_file() and (base / TEKKEN).is_file()
    return base / TEKKEN if is_needed else folder


def _file_of_mistral(location: Path, name: str, flag: str) -> Path:
    folder = location if location.is_dir() else location.parent
    if not (folder / name).is_file():
        raise CheckpointError(f"{location} holds no {name}, which --{flag} mistral asks for; leave that flag out")
    return folder / name


def resolve_adapter(name: str) -> Path:
    """Return the local folder of the LoRA adapter ``name``, a folder or a hub id, which is downloaded.

    The folder's contents are not checked. Raises CheckpointError for a path that is not a folder, and for a hub id that
    cannot be downloaded.
    """
    return _resolve("adapter", name, None, None)


def _resolve(
    kind: Kind, name: str, revision: str | None, download_dir: str | None, files: Sequence[str] = _FILES
) -> Path:
    try:
        folder = Path(name).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # such as a name that is too long, and ~nobody
        raise CheckpointError(f"{kind} path {name!r:.200} cannot be looked up: {error}; {_REMEDIES[kind]}") from error
    if is_folder:
        return folder
    if is_file and kind != "adapter" and is_checkpoint_file(folder):
        return folder
    if is_file:
        raise CheckpointError(f"{kind} path {folder} is a file; {_REMEDIES[kind]}")
    if not is_hub_id(name):
        raise CheckpointError(f"{kind} path {name} does not exist; {_REMEDIES[kind]}")
    return _download(kind, name, revision, download_dir, files)


def _download(kind: Kind, repo: str, revision: str | None, folder: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cache = None if folder is None else Path(folder).expanduser()
        return Path(snapshot_download(repo, revision=revision, cache_dir=cache, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = reason.removeprefix("Got: ").rstrip(".")
        raise CheckpointError(
            f"{kind} {repo!r} is no local folder, and it could not be downloaded from the hub: {reason}. "
            f"{_remedy(error, repo, revision)}"
        ) from error


def _remedy(error: Exception, repo: str, revision: str | None) -> str:
    """A user's next step after ``error`` of the hub's library."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    token = "set HF_TOKEN to a token of an account that may read it"
    if isinstance(error, GatedRepoError):
        return f"It is gated: accept its terms at {constants.ENDPOINT}/{repo}, and {token}"
    if isinstance(error, RepositoryNotFoundError):
        return f"Check the id; where it is private, {token}"
    if isinstance(error, RevisionNotFoundError):
        return f"It has no branch, tag or commit {revision!r}: check --hub-revision"
    if isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it for a first download, or give a local folder"
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return "The hub lists a file that it does not have: report this to the model's author, or give a local folder"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"The token that was sent is not enough: {token}"
    return "Give a local folder, or check the id and the network"
