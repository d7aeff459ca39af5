"""The settings of one engine: how they are checked against each other, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError

from hardpoint.config.errors import LISTED_BY, invalid_setting, setting_of, written
from hardpoint.config.settings import EngineSettings
from hardpoint.config.types import ExecutorKind, FileFormat
from hardpoint.config.vllm_names import translate_settings
from hardpoint.parallel.topology import Topology
from hardpoint.plugin_host import LOCK_FILE_NAME
from hardpoint_plugin_api import FAMILIES, ConfigChange, ConfigError, ConfigKey, RequestError, UnknownNameError

PluginKeys = Mapping[str, Mapping[str, ConfigKey]]
"""The keys that each plugin owns, by the plugin's name."""
_OF_ONE_SERVER = ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local")
"""Settings that say which replicas a server has. Other servers have other values."""


class EngineConfig(EngineSettings):
    """Everything that a user decides about an engine. Build it with ``create`` or ``load_config``."""

    _explicit: frozenset[str] = PrivateAttr(default=frozenset())
    _replica: int = PrivateAttr(default=0)
    """The place of the engine's core among the replicas of this server."""
    _launched: int | None = PrivateAttr(default=None)
    """The replica of this process, one of torchrun's, where replicas share experts."""
    _meeting: str = PrivateAttr(default="")
    """The folder where replicas that share experts meet; the number of the start where they are of several servers."""

    def model_post_init(self, context: object, /) -> None:
        """Note which keys the user gave, a plugin's as ``"acme.key"``."""
        plugin_keys = {f"{plugin}.{key}" for plugin, keys in self.plugin_config.items() for key in keys}
        self._explicit = frozenset(self.model_fields_set - {"plugin_config"} | plugin_keys)

    @classmethod
    def create(cls, **settings: Any) -> Self:
        """Build a config from Python keywords, ours or vLLM's.

        The keys of ``plugin_config`` are checked later, by ``with_plugin_keys``, once the plugins are known.
        Raises ConfigError (UnknownNameError for an unknown keyword), naming key, value and what is valid.
        """
        return cls._build(translate_settings(settings, cls.model_fields), {})

    @classmethod
    def _build(cls, settings: Mapping[str, Any], origins: Mapping[str, str]) -> Self:
        """``origins`` says where a key's value comes from, as the user wrote it (default: a Python keyword)."""
        unknown = [key for key in settings if key not in cls.model_fields]
        if unknown:
            errors = [UnknownNameError("setting", key, cls.model_fields, listed_by=LISTED_BY) for key in unknown]
            raise errors[0] if len(errors) == 1 else ConfigError("\n".join(map(str, errors)))
        if "model" not in settings:
            raise ConfigError(
                "no model was given: name a folder, a GGUF file, a hub id, or 'demo' for the built-in one"
            )
        try:
            config = cls(**settings)
        except ValidationError as error:
            raise invalid_setting(error, origins) from None
        for key, choice in config._family_flags().items():
            if config.use.get(key, choice) != choice:
                flag = written(setting_of(str(FAMILIES[key].flag)), choice, origins)
                use = written(f"use.{key}", config.use[key], origins)
                raise ConfigError(f"{flag} and {use} contradict each other; keep one")
        local = config.model == "demo" or os.path.exists(os.path.expanduser(config.model))
        if config.hub_revision is not None and local:
            revision = written("hub_revision", config.hub_revision, origins)
            raise ConfigError(f"{revision}: a revision applies to hub ids, and the model {config.model!r} is local")
        if config.plugins_lock_file != LOCK_FILE_NAME and not config.plugins_locked:
            file = written("plugins_lock_file", config.plugins_lock_file, origins)
            raise ConfigError(f"{file}: the lock file is read with --plugins-locked only; add it, or leave this out")
        if config.shadow_check and not config.enforce_eager:
            rate = written("shadow_check", config.shadow_check, origins)
            raise ConfigError(f"{rate}: ops in a captured graph cannot be compared one by one; add --enforce-eager")
        if config.blame_ops and not config.enforce_eager:
            blame = written("blame_ops", config.blame_ops, origins)
            raise ConfigError(f"{blame}: a crash in a captured graph names no op; add --enforce-eager")
        if config.gpu_memory_utilization is not None and config.kv_cache_memory is not None:
            share = written("gpu_memory_utilization", config.gpu_memory_utilization, origins)
            size = written("kv_cache_memory", config.kv_cache_memory, origins)
            raise ConfigError(f"{share} and {size} both size the KV cache; keep one")
        config._check_ranks(origins)
        config._check_replicas(origins)
        config._check_restart(origins)
        config._check_speculation(origins)
        config._check_lora(origins)
        if config.config_format not in ("auto", config.checkpoint_format):
            form, other = (written(key, getattr(config, key), origins) for key in ("config_format", "load_format"))
            raise ConfigError(f"{form} and {other} name formats of one checkpoint; keep one")
        return config

    def _check_ranks(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError where the settings of several ranks contradict each other."""
        groups, size = self.expert_parallel_size, written("tensor_parallel_size", self.tensor_parallel_size, origins)
        if groups is not None and self.tensor_parallel_size % groups:
            wanted = written("expert_parallel_size", groups, origins)
            raise ConfigError(f"{wanted} must divide the number of ranks that share a layer, {size}")
        if self.enable_expert_parallel and groups is not None and groups == 1:
            wanted = written("expert_parallel_size", groups, origins)
            raise ConfigError(f"{wanted} contradicts --enable-expert-parallel; leave one of them out")
        if (layers := self.pipeline_parallel_layers) and len(layers) != self.pipeline_parallel_size:
            given = written("pipeline_parallel_layers", layers, origins)
            stages = written("pipeline_parallel_size", self.pipeline_parallel_size, origins)
            raise ConfigError(f"{given} has {len(layers)} numbers; it must have one for each pipeline stage ({stages})")
        self._check_shared_experts(origins)
        self._check_balancing(origins)
        if self.executor == "torchrun" and self.core_process:
            process = written("core_process", self.core_process, origins)
            raise ConfigError(f"{process} contradicts --executor torchrun, whose processes are the ranks; leave it out")
        if self.executor == "inproc" and self.topology.world > 1:
            wanted = written("executor", self.executor, origins)
            raise ConfigError(
                f"{wanted} runs one rank, and {self.topology} asks for several; use --executor mp, ray or torchrun"
            )

    def _check_shared_experts(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError where replicas cannot share experts as asked."""
        addresses = ("data_parallel_address", "data_parallel_rpc_port")
        given = [written(key, getattr(self, key), origins) for key in addresses if key in self._explicit]
        shared = "--enable-expert-parallel divides the experts among the ranks of all replicas"
        own = "leave that flag out, or divide the experts among the ranks of each replica by --expert-parallel-size"
        local, is_launched = self.local_replicas, self.executor == "torchrun"
        is_apart = self._shares_experts and not is_launched and len(local) < self.data_parallel_size
        if given and not is_apart:
            raise ConfigError(
                f"{given[0]} takes effect where replicas of several servers share experts: with "
                "--enable-expert-parallel, --data-parallel-size and --data-parallel-size-local; leave it out"
            )
        if not self._shares_experts:
            return
        if is_apart:
            here = f"this server has {len(local)} of {written('data_parallel_size', self.data_parallel_size, origins)}"
            if self.data_parallel_address is None:
                raise ConfigError(
                    f"{shared}, and {here}, so that it must find the other servers; give each of them "
                    f"--data-parallel-address HOST, the address of the server with replica 0, or {own}"
                )
        if self.executor not in (None, "mp", "ray", "torchrun"):
            executor = written("executor", self.executor, origins)
            raise ConfigError(f"{shared}, and {executor} does not serve that; {own}")
        numbered = [key for key in _OF_ONE_SERVER if getattr(self, key) is not None]
        if is_launched and numbered:
            key = written(numbered[0], getattr(self, numbered[0]), origins)
            raise ConfigError(f"{key}: torchrun numbers the ranks of all replicas; leave it out")

    def _check_balancing(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError where experts cannot be balanced as asked."""
        if not self.enable_eplb:
            for key in ("num_redundant_experts", "eplb_step_interval", "eplb_window_size"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    given = written(key, getattr(self, key), origins)
                    raise ConfigError(f"{given} has no effect without --enable-eplb; add that flag, or leave this out")
            return
        wanted = written("enable_eplb", self.enable_eplb, origins)
        if self.topology.expert == 1:
            raise ConfigError(f"{wanted} needs ranks with experts of their own; add --enable-expert-parallel")
        if self.batch_invariant:
            raise ConfigError(
                f"{wanted} changes the order of sums when experts move, and --batch-invariant forbids that; keep one"
            )
        if self.eplb_window_size > self.eplb_step_interval:
            window = written("eplb_window_size", self.eplb_window_size, origins)
            interval = written("eplb_step_interval", self.eplb_step_interval, origins)
            raise ConfigError(f"{window} must be at most {interval}")

    def _check_replicas(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError for replicas that do not exist, or cannot be run."""
        rank, keys = self.data_parallel_rank, ("data_parallel_size_local", "data_parallel_start_rank")
        others = [written(key, getattr(self, key), origins) for key in keys if getattr(self, key) is not None]
        if rank is not None and others:
            raise ConfigError(f"{written('data_parallel_rank', rank, origins)} contradicts {others[0]}; keep one")
        total, local = written("data_parallel_size", self.data_parallel_size, origins), self.local_replicas
        if local.stop > self.data_parallel_size:
            asked = others or [written("data_parallel_rank", rank, origins)]
            raise ConfigError(
                f"{', '.join(asked)}: replicas {local.start} to {local.stop - 1} were asked for, and {total} has "
                f"replicas 0 to {self.data_parallel_size - 1}"
            )
        if len(local) > 1 and self.core_process is False and self.executor != "torchrun":
            process = written("core_process", self.core_process, origins)
            raise ConfigError(f"{total} needs a process for each replica, and {process} forbids it; keep one")
        if len(local) > 1 and self.executor == "torchrun" and not self._shares_experts:
            raise ConfigError(
                f"{total}: torchrun starts the ranks of one replica; start it once for each replica, each time with "
                "another --data-parallel-rank"
            )

    def _check_restart(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError where an engine that fails could not be built again."""
        if self.on_engine_failure != "restart":
            return
        wanted = written("on_engine_failure", self.on_engine_failure, origins)
        if self.core_process is False:
            process = written("core_process", self.core_process, origins)
            raise ConfigError(f"{wanted} needs a core in a process of its own, and {process} forbids it; keep one")
        if self.executor == "torchrun":
            executor = written("executor", self.executor, origins)
            raise ConfigError(f"{wanted}: {executor} leaves restarting ranks to torchrun (its flag --max-restarts)")

    def _check_speculation(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError for settings of drafts where none are made, and for a match that has no length."""
        for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, key)
            if key in self._explicit and not self.num_drafts:
                wanted = written(key, value, origins)
                raise ConfigError(f"{wanted}: speculative decoding is off; add --speculative-method, or leave this out")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            shortest = written("prompt_lookup_min", self.prompt_lookup_min, origins)
            longest = written("prompt_lookup_max", self.prompt_lookup_max, origins)
            raise ConfigError(f"{shortest} is above {longest}; set both")

    def _check_lora(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError for settings of adapters where none are served, and for more than have slots."""
        for key in ("max_loras", "max_lora_rank", "lora_modules"):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and not self.enable_lora:
                wanted = written(key, value, origins)
                raise ConfigError(f"{wanted}: LoRA adapters are off; add --enable-lora, or leave this out")
        if len(self.lora_modules) > self.max_loras:
            wanted = written("lora_modules", self.lora_modules, origins)
            slots = written("max_loras", self.max_loras, origins)
            raise ConfigError(f"{wanted}: {len(self.lora_modules)} adapters do not fit {slots}; raise it")

    @property
    def lora_paths(self) -> Mapping[str, str]:
        """The adapters of --lora-modules: folders or hub ids by name."""
        return {name: path for name, _, path in (module.partition("=") for module in self.lora_modules)}

    @property
    def num_adapters(self) -> int:
        """The largest number of LoRA adapters loaded at once; 0 where the engine serves none."""
        return self.max_loras if self.enable_lora else 0

    @property
    def num_drafts(self) -> int:
        """The most tokens that are drafted for a request and step; 0 where the engine does not speculate."""
        return self.num_speculative_tokens if "drafter" in self.choices else 0

    @property
    def restarts_engine(self) -> bool:
        """True where an engine that fails is built again."""
        return self.on_engine_failure == "restart"

    def wants_core_process(self, default: bool) -> bool:
        """Whether the core gets a process of its own; ``default`` where neither the user nor another setting says."""
        needed = self.restarts_engine or (len(self.local_replicas) > 1 and self.executor != "torchrun")
        return (default or needed) if self.core_process is None else self.core_process

    def denying(self, choice: str) -> Self:
        """This config with one more entry on the deny list."""
        return self._changed({"deny": (*self.deny, choice)})

    def on_one_rank(self) -> Self:
        """This config for an engine of one rank and one replica, in this process."""
        sizes = {f"{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "data")}
        places = {
            "expert_parallel_size": None,
            "enable_expert_parallel": False,
            "executor": None,
            "core_process": False,
        }
        return self._changed({**sizes, **places})

    def with_block_size(self, block_size: int) -> Self:
        """This config with --block-size."""
        return self._changed({"block_size": block_size})

    def waiting_for_all(self) -> Self:
        """This config with --wait-for-kernels and --wait-for-graphs, but for what the user set."""
        return self._changed(
            {key: True for key in ("wait_for_kernels", "wait_for_graphs") if key not in self._explicit}
        )

    def loading_no_adapters(self) -> Self:
        """This config without --lora-modules."""
        return self._changed({"lora_modules": ()})

    def blaming_ops(self) -> Self:
        """This config with --blame-ops, and without captured graphs, in which no op can be named."""
        return self._changed({"blame_ops": True, "enforce_eager": True})

    @property
    def compiles(self) -> bool:
        """Whether models are compiled."""
        return self.compile and not self.enforce_eager

    @property
    def checkpoint_format(self) -> FileFormat:
        """The format of the checkpoint's files."""
        return "mistral" if self.load_format == "mistral" else self.config_format

    @property
    def topology(self) -> Topology:
        """How many ranks there are, and how they are divided: no other code reads the sizes that decide it."""
        tensor, local = self.tensor_parallel_size, self.local_replicas
        if not self._shares_experts:
            expert = self.expert_parallel_size or (tensor if self.enable_expert_parallel else 1)
            return Topology(tensor, expert, self.pipeline_parallel_size, len(local), self._replica)
        replicas = self.data_parallel_size
        here = None if len(local) == replicas or self.executor == "torchrun" else local
        replica = local[self._replica]
        return Topology(tensor, tensor * replicas, self.pipeline_parallel_size, replicas, replica, here)

    @property
    def _shares_experts(self) -> bool:
        return self.enable_expert_parallel and not self.expert_parallel_size and self.data_parallel_size > 1

    @property
    def rendezvous(self) -> tuple[str, int] | None:
        """Address and port of the store where the replicas of several servers meet that share experts; None for those
        of one server, or of torchrun."""
        if self.topology.here is None:
            return None
        assert self.data_parallel_address is not None
        return self.data_parallel_address, self.data_parallel_rpc_port

    @property
    def local_replicas(self) -> range:
        """The numbers of this server's replicas among all."""
        if self._launched is not None:
            return range(self._launched, self._launched + 1)
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        first = self.data_parallel_start_rank or 0
        count = self.data_parallel_size if self.data_parallel_size_local is None else self.data_parallel_size_local
        return range(first, first + count)

    def of_replica(self, number: int) -> Self:
        """The config of the core that is this one of the ``local_replicas``."""
        config = self._changed({})
        config._replica = self.local_replicas.index(number)
        return config

    def of_launched(self, replica: int) -> Self:
        """The config of a process that torchrun started for the replica of that number, which shares experts."""
        config = self._changed({})
        config._launched = replica
        return config

    def of_one_rank(self) -> Self:
        """This config with the whole model on one rank."""
        sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1)
        alone: dict[str, object] = {"pipeline_parallel_layers": (), "enable_expert_parallel": False, "executor": None}
        return self._changed({**sizes, **alone, "expert_parallel_size": None})

    def meeting_in(self, folder: str) -> Self:
        """The config of a replica that shares experts with others, which it meets in ``folder``, or in the part of
        that name of a store."""
        config = self._changed({})
        config._meeting = folder
        return config

    @property
    def meeting(self) -> str:
        """The folder, or the part of a store, where replicas meet that share experts; empty where they share none."""
        return self._meeting

    def learning(self, deny: Iterable[str], *, blame_ops: bool) -> Self:
        """This config with what failures have taught other replicas: their deny lists, and whether ops are blamed.

        The list is sorted, so that all that have learned from one another have the same.
        """
        known = tuple(sorted({*self.deny, *deny}))
        config = self if known == self.deny else self._changed({"deny": known})
        return config.blaming_ops() if blame_ops and not config.blame_ops else config

    def check_data_parallel_rank(self, rank: int | None) -> None:
        """Raise RequestError for a request that asks for a replica of another server; None asks for any."""
        local = self.local_replicas
        if rank is None or rank in local:
            return
        here = f"replica {local.start}" if len(local) == 1 else f"replicas {local.start} to {local.stop - 1}"
        raise RequestError(
            f"data_parallel_rank {rank}: this server has {here} of {self.data_parallel_size}. Load balancing is "
            "internal with --data-parallel-size N alone (ranks 0 to N - 1), hybrid with --data-parallel-start-rank S "
            "and --data-parallel-size-local L (ranks S to S + L - 1), external with --data-parallel-rank R (rank R)"
        )

    @property
    def executor_kind(self) -> ExecutorKind:
        """The name of the executor, which decides where ranks run."""
        return self.executor or ("mp" if self.topology.world > 1 else "inproc")

    @property
    def explicit(self) -> frozenset[str]:
        """The keys that the user set, a plugin's as ``"acme.key"``; nothing else may override them."""
        return self._explicit

    @property
    def explicit_on_all_servers(self) -> frozenset[str]:
        """``explicit`` without the keys that say which replicas one server has: all servers need the same values."""
        return self._explicit.difference(_OF_ONE_SERVER)

    def explicit_settings(self) -> dict[str, Any]:
        """The settings that the user gave, as a configuration file has them: plugins' keys in their own sections."""
        settings: dict[str, Any] = {}
        for key in sorted(self._explicit):
            section, dot, name = key.partition(".")
            if dot:
                settings.setdefault(section, {})[name] = self.plugin_config[section][name]
            else:
                settings[key] = getattr(self, key)
        return settings

    @property
    def choices(self) -> dict[str, str]:
        """Names that the user chose, by family (``"attention"``) or slot (``"op.rms_norm"``)."""
        return {**self._family_flags(), **self.use}

    def _family_flags(self) -> dict[str, str]:
        """The choices made by flags of their own, such as --attention-backend."""
        values = {f.name: getattr(self, setting_of(f.flag)) for f in FAMILIES.values() if f.flag}
        return {family: value for family, value in values.items() if value is not None}

    def selection_view(self) -> Mapping[str, object]:
        """The settings as plain read-only data, for selectors, requests and plugins' hooks."""
        return MappingProxyType(self.model_dump())

    def with_plugin_keys(self, plugin_keys: PluginKeys) -> Self:
        """Return this config with every plugin's section checked, typed and filled up with its defaults.

        Raises ConfigError (UnknownNameError for a plugin or key that is not known).
        """
        return self._with_sections(plugin_keys, {})

    def _with_sections(self, plugin_keys: PluginKeys, origins: Mapping[str, str]) -> Self:
        sections = {plugin: {k.name: k.default for k in keys.values()} for plugin, keys in plugin_keys.items()}
        for plugin, values in self.plugin_config.items():
            if plugin not in plugin_keys:
                if not any(f"{plugin}.{key}" in self.explicit for key in values):
                    continue  # defaults of a plugin that the allowlist leaves out
                raise UnknownNameError("plugin", plugin, plugin_keys, "It is not installed, or not on the allowlist.")
            for key, value in values.items():
                if key not in plugin_keys[plugin]:
                    raise UnknownNameError(f"setting of plugin {plugin}:", key, plugin_keys[plugin])
                where = origins.get(f"{plugin}.{key}", f"{plugin}.{key}")
                try:
                    sections[plugin][key] = plugin_keys[plugin][key].parse(value, where)
                except ValueError as error:
                    raise ConfigError(str(error)) from None
        return self._changed({"plugin_config": sections})

    def with_changes(self, changes: Iterable[ConfigChange]) -> tuple[Self, list[str]]:
        """Return the config with the changes that plugins wish for, and a line for the log on each of them.

        A key that the user set keeps its value. Raises ConfigError for an unknown key or an invalid value, which is a
        plugin's bug.
        """
        config, lines = self, []
        for change in changes:
            old = config._value(change.key)
            if change.key in self.explicit:
                lines.append(f"kept {change.key} = {old!r}, which you set; wished: {change.value!r}, {change.reason}")
            else:
                config = config._with_value(change.key, change.value)
                lines.append(f"{change.key}: {old!r} -> {change.value!r}, {change.reason}")
        return config, lines

    def _value(self, key: str) -> object:
        section, _, name = key.partition(".")
        values = self.plugin_config.get(section, {})
        if name in values:
            return values[name]
        if key not in type(self).model_fields or key == "plugin_config":
            own = {f"{plugin}.{name}" for plugin, keys in self.plugin_config.items() for name in keys}
            raise UnknownNameError("setting in a plugin's wish:", key, {*type(self).model_fields, *own})
        return getattr(self, key)

    def _with_value(self, key: str, value: Any) -> Self:
        section, dot, name = key.partition(".")
        if not dot:
            given = self.model_dump(exclude_unset=True)
            checked = type(self)._build({**given, key: value}, {key: f"a plugin's wish: {key}"})
            return self._changed({key: getattr(checked, key)})
        old = self.plugin_config[section][name]
        if type(value) is not type(old):
            raise ConfigError(f"a plugin's wish: {key} = {value!r} is invalid: must be like its default, {old!r}")
        return self._changed(
            {"plugin_config": {**self.plugin_config, section: {**self.plugin_config[section], name: value}}}
        )

    def _changed(self, update: dict[str, Any]) -> Self:
        """A copy with other values, which still remembers what the user set."""
        config = self.model_copy(update=update)
        config._explicit = self._explicit
        return config


SETTINGS = tuple(name for name in EngineConfig.model_fields if name != "plugin_config")
"""The settings that have a flag and a key in a config file."""
