"""The tree itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from hardpoint.config.errors import flag_of, invalid_setting, setting_of, written
from hardpoint.config.types import (
    AnyDtype,
    Bytes,
    CacheDtype,
    Count,
    CustomOps,
    Deny,
    ExecutorKind,
    Index,
    LoadFormat,
    Names,
    NumSeqs,
    NumTokens,
    OnFailure,
    Options,
    PageSize,
    Parser,
    Seed,
    Share,
    Text,
    Use,
)
from hardpoint.config.vllm_flags import advice
from hardpoint.parallel.topology import Topology
from hardpoint.plugin_host import LOCK_FILE_NAME
from hardpoint_plugin_api import FAMILIES, ConfigChange, ConfigError, ConfigKey, ConfigValue, UnknownNameError

PluginKeys = Mapping[str, Mapping[str, ConfigKey]]
"""The keys that each plugin owns, by the plugin's name."""


class EngineConfig(BaseModel):
    """Everything that a user decides about an engine. Build it with ``create`` or ``load_config``.

    A description is the help text of the flag of that name; None stands for: chosen by Hardpoint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model: Text = Field(description="The model: a folder, a hub id, or 'demo' for the built-in one.")
    tokenizer: Text | None = Field(None, description="Folder or hub id of the tokenizer, where it is not the model's.")
    hub_revision: Text | None = Field(None, description="Branch, tag or commit of a model from the hub.")
    chat_template: Text | None = Field(
        None, description="File of a Jinja template for chats, in place of the checkpoint's."
    )
    platform: Text | None = Field(None, description="The kind of device to run on.")
    device_index: Index = Field(0, description="Which device of the platform.")
    dtype: AnyDtype = Field("auto", description="Data type of weights and activations; auto: the checkpoint's.")
    plugins: Names | None = Field(None, description="Allowlist: only these plugins are used (NAME,NAME...).")
    plugins_locked: bool = Field(False, description="Use only plugins that are to the byte as the lock file says.")
    plugins_lock_file: Text = Field(LOCK_FILE_NAME, description="The lock file of --plugins-locked.")
    require_certified: bool = Field(
        False, description="Use only what a certificate of level full or better shows right on such a device."
    )
    certificates: Text | None = Field(
        None, description="The one folder whose certificates count; by default the plugins' own and the local ones."
    )
    attention_backend: Text | None = Field(
        None, description="The attention backend, wherever it is offered; for one kind: --use attention.OF=NAME."
    )
    linear_backend: Text | None = Field(None, description="The matmul kernels behind linear layers.")
    experts_backend: Text | None = Field(None, description="The kernels of a mixture of experts.")
    all2all_backend: Text | None = Field(None, description="What exchanges tokens between the ranks of experts.")
    tool_parser: Parser | None = Field(
        None, description="How tool calls are written in outputs: a parser, or none; by default by the chat template."
    )
    reasoning_parser: Parser | None = Field(
        None, description="How reasoning is marked in outputs: a parser, or none; by default by the chat template."
    )
    speculative_method: Text | None = Field(
        None, description="Draft tokens by this method, which the next step verifies: ngram, or a plugin's."
    )
    num_speculative_tokens: Count = Field(4, description="Most tokens drafted for a request and step.")
    prompt_lookup_min: Count = Field(2, description="Shortest match that ngram looks for, in tokens.")
    prompt_lookup_max: Count = Field(4, description="Longest match that ngram looks for, in tokens.")
    custom_ops: CustomOps = Field(("all",), description="Ops with plugins' kernels: all or none, then +name and -name.")
    use: Use = Field(default_factory=dict, description="Choose an implementation, as in op.rms_norm=NAME; repeatable.")
    deny: Deny = Field((), description="Implementations that are never chosen (op.rms_norm=NAME,...).")
    load_format: LoadFormat = Field(
        "auto", description="Where weights come from: the checkpoint (auto), or random, to measure a shape."
    )
    quantization: Text | None = Field(None, description="Quantize while loading, by this method: fp8, int8, int4.")
    quantization_options: Options = Field((), description="How it quantizes (KEY=VALUE,KEY=VALUE).")
    kv_cache_dtype: CacheDtype = Field("auto", description="Data type of the KV cache (fp8_e4m3, int8); auto: model's.")
    block_size: PageSize | None = Field(
        None, description="Tokens per block of the KV cache (default: the platform's, or as many as a state is large)."
    )
    kv_cache_memory: Bytes | None = Field(None, description="Size of the KV cache: bytes, or as in 4GiB.")
    max_model_len: Count | None = Field(None, description="Longest sequence, prompt and output together, in tokens.")
    max_num_seqs: NumSeqs = Field(256, description="Most sequences that run at once.")
    max_num_batched_tokens: NumTokens = Field(2048, description="Most tokens in one step.")
    enable_prefix_caching: bool = Field(True, description="Reuse the cache of prompts that begin alike.")
    async_scheduling: bool | None = Field(
        None,
        description="Submit a step before the last one's tokens are known; by default on accelerators, and with "
        "pipeline stages.",
    )
    enforce_eager: bool = Field(False, description="Without compilation and recorded graphs.")
    core_process: bool | None = Field(
        None, description="Run the engine core in a process of its own; by default for AsyncEngine only."
    )
    core_start_timeout: Count = Field(600, description="Seconds that such a process may take to load the model.")
    batch_invariant: bool = Field(
        False, description="A request's output is the same to the bit whatever else runs; slower."
    )
    shadow_check: Share = Field(
        0.0, description="Share of op calls that the reference computes too, to compare; needs --enforce-eager."
    )
    tensor_parallel_size: Count = Field(1, description="Among how many devices (ranks) every layer is divided.")
    pipeline_parallel_size: Count = Field(
        1, description="Among how many stages the model's blocks are divided; each has as many ranks as a layer."
    )
    enable_expert_parallel: bool = Field(
        False, description="Divide mixtures of experts among those ranks by whole experts."
    )
    expert_parallel_size: Count | None = Field(
        None, description="By whole experts among so many groups of ranks; within one, each expert is divided."
    )
    communicator: Text | None = Field(None, description="The collectives between ranks.")
    executor: ExecutorKind | None = Field(
        None,
        description="Where ranks run: inproc (one), mp (processes of this host, the default of several), torchrun.",
    )
    step_timeout: Count = Field(300, description="Seconds after which a step counts as hung.")
    on_engine_failure: OnFailure | None = Field(
        None,
        description="What becomes of open requests when the engine fails: fail, or restart (a new engine goes on with "
        "them); by default restart for serve, else fail.",
    )
    max_engine_restarts: Count = Field(5, description="How often within the window below it is built again.")
    engine_restart_window: Count = Field(600, description="Seconds in which restarts are counted.")
    enable_lora: bool = Field(False, description="Serve LoRA adapters beside the model.")
    max_loras: Count = Field(1, description="Most LoRA adapters that are loaded at once.")
    max_lora_rank: Count = Field(16, description="Highest rank of a LoRA adapter; memory is taken for it.")
    lora_modules: Options = Field((), description="LoRA adapters to load at the start (NAME=PATH,NAME=PATH).")
    blame_ops: bool = Field(
        False, description="Have crashes name the op's kernel; every call is waited for; needs --enforce-eager."
    )
    seed: Seed = Field(0, description="Seed of everything random.")
    tuning_file: Text | None = Field(None, description="Measured winners, which come before priorities.")
    tuning_tables: Text | None = Field(
        None, description="Folder of kernels' tuning tables (tile sizes), whose rules come before the shipped ones."
    )
    plugin_config: dict[str, dict[str, ConfigValue]] = Field(
        default_factory=dict, description="The plugins' own settings, by plugin and key."
    )

    _explicit: frozenset[str] = PrivateAttr(default=frozenset())

    def model_post_init(self, context: object, /) -> None:
        """Note which keys the user gave, a plugin's as ``"acme.key"``."""
        plugin_keys = {f"{plugin}.{key}" for plugin, keys in self.plugin_config.items() for key in keys}
        self._explicit = frozenset(self.model_fields_set - {"plugin_config"} | plugin_keys)

    @classmethod
    def create(cls, **settings: Any) -> Self:
        """Build a config from Python keywords.

        The keys of ``plugin_config`` are checked later, by ``with_plugin_keys``, once the plugins are known.
        Raises ConfigError (UnknownNameError for an unknown keyword), naming key, value and what is valid.
        """
        return cls._build(settings, {})

    @classmethod
    def _build(cls, settings: Mapping[str, Any], origins: Mapping[str, str]) -> Self:
        """``origins`` says where a key's value comes from, as the user wrote it (default: a Python keyword)."""
        for key in settings:
            if key not in cls.model_fields:
                raise UnknownNameError("setting", key, cls.model_fields, f"{advice(flag_of(key)) or ''}")
        if "model" not in settings:
            raise ConfigError("no model was given: name a folder, a hub id, or 'demo' for the built-in one")
        try:
            config = cls(**settings)
        except ValidationError as error:
            raise invalid_setting(error, origins) from None
        for key, choice in config._family_flags().items():
            if config.use.get(key, choice) != choice:
                flag = written(setting_of(str(FAMILIES[key].flag)), choice, origins)
                use = written(f"use.{key}", config.use[key], origins)
                raise ConfigError(f"{flag} and {use} contradict each other; keep one")
        local = config.model == "demo" or os.path.isdir(os.path.expanduser(config.model))
        if config.hub_revision is not None and local:
            revision = written("hub_revision", config.hub_revision, origins)
            raise ConfigError(f"{revision}: a revision applies to hub ids, and the model {config.model!r} is local")
        if config.plugins_lock_file != LOCK_FILE_NAME and not config.plugins_locked:
            file = written("plugins_lock_file", config.plugins_lock_file, origins)
            raise ConfigError(f"{file}: it is read with --plugins-locked alone; add that, or leave it out")
        if config.shadow_check and not config.enforce_eager:
            rate = written("shadow_check", config.shadow_check, origins)
            raise ConfigError(f"{rate}: recorded graphs make no single calls to compare; add --enforce-eager")
        if config.blame_ops and not config.enforce_eager:
            blame = written("blame_ops", config.blame_ops, origins)
            raise ConfigError(f"{blame}: recorded graphs make no single calls to name; add --enforce-eager")
        config._check_ranks(origins)
        config._check_restart(origins)
        config._check_speculation(origins)
        config._check_lora(origins)
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
        if self.executor == "torchrun" and self.core_process:
            process = written("core_process", self.core_process, origins)
            raise ConfigError(f"{process} contradicts --executor torchrun, whose processes are the ranks; leave it out")
        if self.executor == "inproc" and self.topology.size > 1:
            wanted = written("executor", self.executor, origins)
            raise ConfigError(
                f"{wanted} runs one rank, and {self.topology} asks for several; use --executor mp or torchrun"
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
            raise ConfigError(f"{wanted}: {executor} leaves building ranks again to torchrun (--max-restarts)")

    def _check_speculation(self, origins: Mapping[str, str]) -> None:
        """Raise ConfigError for settings of drafts where none are made, and for a match that has no length."""
        for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, key)
            if key in self._explicit and not self.num_drafts:
                wanted = written(key, value, origins)
                raise ConfigError(f"{wanted}: nothing is drafted; add --speculative-method, or leave it out")
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
                raise ConfigError(f"{wanted}: no adapters are served; add --enable-lora, or leave it out")
        if len(self.lora_modules) > self.max_loras:
            wanted = written("lora_modules", self.lora_modules, origins)
            slots = written("max_loras", self.max_loras, origins)
            raise ConfigError(f"{wanted}: {len(self.lora_modules)} adapters do not fit {slots}; raise it")

    @property
    def num_adapters(self) -> int:
        """How many LoRA adapters may be loaded at once; 0 where the engine serves none."""
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
        return (default or self.restarts_engine) if self.core_process is None else self.core_process

    def denying(self, choice: str) -> Self:
        """This config with one more entry on the deny list."""
        return self._changed({"deny": (*self.deny, choice)})

    def with_block_size(self, block_size: int) -> Self:
        """This config with --block-size."""
        return self._changed({"block_size": block_size})

    def loading_no_adapters(self) -> Self:
        """This config without --lora-modules."""
        return self._changed({"lora_modules": ()})

    def blaming_ops(self) -> Self:
        """This config with --blame-ops, and without the recorded graphs in which no op can be named."""
        return self._changed({"blame_ops": True, "enforce_eager": True})

    @property
    def topology(self) -> Topology:
        """How many ranks there are, and how they are divided: no other code reads the sizes that decide it."""
        tensor = self.tensor_parallel_size
        expert = self.expert_parallel_size or (tensor if self.enable_expert_parallel else 1)
        return Topology(tensor, expert, self.pipeline_parallel_size)

    @property
    def executor_kind(self) -> ExecutorKind:
        """Where ranks run."""
        return self.executor or ("mp" if self.topology.size > 1 else "inproc")

    @property
    def explicit(self) -> frozenset[str]:
        """The keys that the user set, a plugin's as ``"acme.key"``; nothing else may override them."""
        return self._explicit

    def explicit_settings(self) -> dict[str, Any]:
        """What the user set, plugins' keys in sections of theirs, as a configuration file has it."""
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
        """What the user chose by name: by family (``"attention"``) or slot (``"op.rms_norm"``)."""
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
