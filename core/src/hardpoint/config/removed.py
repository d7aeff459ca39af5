"""Names that users bring from elsewhere, and what to say in their place.

A name that is gone answers with the reason and what to use instead. Of environment variables: Hardpoint takes no
setting from them. One that is named like a setting of Hardpoint's own is an error, since whoever set it expects it to
count. One of another engine is a warning: it may be set for that engine, on a machine that runs both, and must not
break this one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hardpoint.config.engine_config import SETTINGS, PluginKeys
from hardpoint.config.errors import flag_of
from hardpoint_plugin_api import ConfigError, nearest

PREFIX = "HARDPOINT_"

_SERVICE_LINK = re.compile(r"\w+_SERVICE_(HOST|PORT)(_\w+)?|\w+_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")
"""Variables that Kubernetes sets for a service, say one named ``hardpoint``: ``HARDPOINT_PORT_8000_TCP``."""

_ATTENTION = re.compile(r"\w*(ATTENTION|ATTN)_(BACKEND|VERSION|IMPL)|\w+_USE_\w*FLASH_ATT\w*")
"""How engines call the variables that choose their attention kernels."""

_OTHERS = {
    "VLLM_BATCH_INVARIANT": "--batch-invariant",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory SIZE",
    "VLLM_DISABLED_KERNELS": "--use FAMILY=NAME or --custom-ops=-NAME",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "--core-process",
    "VLLM_PLUGINS": "--plugins NAME,NAME",
    "VLLM_TORCH_PROFILER_DIR": "hardpoint generate --profile DIR, or LLM.start_profile",
    "VLLM_USE_FLASHINFER_SAMPLER": "--use op.sample_tokens=NAME",
}


@dataclass(frozen=True)
class Removed:
    """A quantization method that is gone: why, and what to use instead, the likeliest first."""

    reason: str
    instead: tuple[str, ...]


REMOVED_QUANTIZATION = {
    "rtn": Removed(
        "other engines dropped the name, which says how weights are rounded and not to what", ("int8", "int4", "fp8")
    ),
    "hqq": Removed(
        "other engines dropped it; its zero points are fractions, which no maintained kernel takes",
        ("int4", "awq", "gptq", "compressed-tensors"),
    ),
    "deepspeedfp": Removed("other engines dropped it with the library that decoded its 6- and 8-bit floats", ("fp8",)),
}


def removed_quantization(method: str, where: str, known: Collection[str]) -> ConfigError | None:
    """The error for a method that is gone, None for any other name.

    ``where`` says where the user wrote it; ``known`` are the methods that are installed.
    """
    removed = REMOVED_QUANTIZATION.get(method)
    if removed is None:
        return None
    installed = [name for name in removed.instead if name in known]
    if installed:
        advice = f"use {' or '.join(installed)}"
    else:
        advice = (
            f"what came after it ({', '.join(removed.instead)}) is not installed; use weights that are not quantized"
        )
    return ConfigError(f"quantization method {method!r} is not supported any more: {removed.reason}; {advice}. {where}")


def check_environment(environ: Mapping[str, str], plugin_keys: PluginKeys) -> list[str]:
    """Return a warning for each variable of another engine that asks for what a flag does here.

    Raises ConfigError, naming each variable and its flag, where one is named like a setting of Hardpoint's own.
    """
    own = [name for name in sorted(environ) if name.startswith(PREFIX) and not _SERVICE_LINK.fullmatch(name)]
    if own:
        where = "is set in the environment, which no setting is read from"
        raise ConfigError("\n".join(f"{name} {where}: {_advice(name, plugin_keys)}" for name in own))
    return list(_warnings(environ))


def _advice(name: str, plugin_keys: PluginKeys) -> str:
    keys = [*SETTINGS, *(f"{plugin}.{key}" for plugin, keys in plugin_keys.items() for key in keys)]
    by_name = {key.replace(".", "_"): key for key in keys}
    wanted = name.removeprefix(PREFIX).casefold()
    guess = wanted if wanted in by_name else nearest(wanted, by_name)
    if guess is None:
        return "unset it; settings are flags, keys of a --config file, or keywords in Python"
    return f"unset it and use {flag_of(by_name[guess])}, or its key in a --config file"


def _warnings(environ: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environ):
        instead = _OTHERS.get(name) or ("--attention-backend NAME" if _ATTENTION.fullmatch(name) else None)
        if instead:
            yield f"{name} in the environment is another engine's, and has no effect here; use {instead}"
