"""The engine's settings: name, type, default, help text, and the group that ``--help`` lists it in."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.config.types import (
    AnyDtype,
    Bytes,
    CacheDtype,
    Count,
    Counts,
    CustomOps,
    Deny,
    ExecutorKind,
    FileFormat,
    Index,
    LoadFormat,
    LoraModules,
    ModelImpl,
    Names,
    NumSeqs,
    NumTokens,
    OnFailure,
    Options,
    PageSize,
    Parser,
    Port,
    Seed,
    Share,
    Text,
    Use,
)
from hardpoint.plugin_host import LOCK_FILE_NAME
from hardpoint_plugin_api import ConfigValue


class Group(StrEnum):
    """The groups of ``--help``, in its order."""

    MODEL = "Model"
    DEVICE = "Device"
    MEMORY = "Memory and cache"
    SCHEDULING = "Scheduling"
    PARALLELISM = "Parallelism"
    KERNELS = "Kernels"
    PLUGINS = "Plugins"
    SPECULATION = "Speculative decoding"
    ADAPTERS = "LoRA adapters"
    FAILURES = "Processes and failures"
    DEBUGGING = "Debugging"


def setting(group: Group, default: Any, help: str, metavar: str | None = None) -> Any:
    """A field of EngineSettings; a ``default`` of ``...`` makes it required.

    ``help`` is the help text of its flag. ``metavar`` stands for the flag's value there; None: follows from the type.
    """
    return Field(default, description=help, json_schema_extra={"group": group, "metavar": metavar})


def group_of(name: str) -> Group:
    """The group that the setting ``name`` was declared in."""
    return Group(_declared(name)["group"])


def metavar_of(name: str) -> str | None:
    """The placeholder that the setting ``name`` was declared with, if any."""
    return _declared(name)["metavar"] or None


def _declared(name: str) -> dict[str, str]:
    return cast(dict[str, str], EngineSettings.model_fields[name].json_schema_extra)


class EngineSettings(BaseModel):
    """The fields of EngineConfig. None as a default: Hardpoint chooses, as the help text says."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model: Text = setting(
        Group.MODEL, ..., "Model to load: a folder, a GGUF file, a hub id, or 'demo' for the built-in model."
    )
    tokenizer: Text | None = setting(
        Group.MODEL, None, "Folder or hub id of the tokenizer. Default: the model's folder."
    )
    skip_tokenizer_init: bool = setting(
        Group.MODEL, False, "Load no tokenizer: prompts are token ids, and outputs have no text."
    )
    download_dir: Text | None = setting(
        Group.MODEL, None, "Folder for models from the hub. Default: the hub's own cache (HF_HOME).", "FOLDER"
    )
    hub_revision: Text | None = setting(Group.MODEL, None, "Branch, tag or commit of a model from the hub.")
    load_format: LoadFormat = setting(
        Group.MODEL,
        "auto",
        "auto: load the checkpoint's weights. random: make random weights, to measure speed. mistral: the same as "
        "--config-format mistral. fastsafetensors, runai_streamer: load by that library, which must be installed.",
    )
    config_format: FileFormat = setting(
        Group.MODEL,
        "auto",
        "Format of a checkpoint. hf: Hugging Face's. mistral: Mistral AI's own, params.json and "
        "consolidated.safetensors. auto: Hugging Face's where a folder has both.",
    )
    tokenizer_mode: FileFormat = setting(
        Group.MODEL,
        "auto",
        "Format of the tokenizer. hf: Hugging Face's. mistral: tekken.json, with chats rendered by mistral-common. "
        "auto: Hugging Face's where a folder has both.",
    )
    model_impl: ModelImpl = setting(
        Group.MODEL,
        None,
        "Code of the model. transformers: Transformers' own, with Hardpoint's layers in it. Default: Hardpoint's own, "
        "or else Transformers' (auto).",
        "NAME",
    )
    dtype: AnyDtype = setting(
        Group.MODEL, "auto", "Data type of weights and activations. auto: the checkpoint's, if the device supports it."
    )
    quantization: Text | None = setting(
        Group.MODEL,
        None,
        "Quantize the weights while loading: fp8, int8, int4, mxfp8, mxfp4, nvfp4, nf4. A checkpoint that is already "
        "quantized needs no flag.",
        "NAME",
    )
    quantization_options: Options = setting(Group.MODEL, (), "Options of the --quantization method.", "KEY=VALUE,...")
    chat_template: Text | None = setting(
        Group.MODEL, None, "File with a Jinja chat template. Default: the checkpoint's template.", "FILE"
    )
    tool_parser: Parser | None = setting(
        Group.MODEL, None, "Parser of tool calls in outputs, or none. Default: chosen by the chat template.", "NAME"
    )
    reasoning_parser: Parser | None = setting(
        Group.MODEL, None, "Parser of reasoning in outputs, or none. Default: chosen by the chat template.", "NAME"
    )
    max_logprobs: Index | None = setting(
        Group.MODEL, None, "Most log-probabilities of a token that a request may ask for. Default: the vocabulary."
    )
    enable_return_routed_experts: bool = setting(
        Group.MODEL,
        False,
        "Keep a record of the experts that each token is routed to, for requests with return_routed_experts.",
    )
    seed: Seed = setting(Group.MODEL, 0, "Seed of random weights, and of sampling in requests without a seed.")

    platform: Text | None = setting(
        Group.DEVICE,
        None,
        "Kind of device to run on, such as cpu. Default: an accelerator if one is found, else cpu.",
        "NAME",
    )
    device_index: Index = setting(Group.DEVICE, 0, "Index of the device. With several ranks: that of the first rank.")

    kv_cache_memory: Bytes | None = setting(
        Group.MEMORY, None, "Size of the KV cache, such as 4GiB. Default: most of the free memory.", "SIZE"
    )
    gpu_memory_utilization: Share | None = setting(
        Group.MEMORY,
        None,
        "Most of the device's memory that may be in use, weights included, from 0 to 1. Default: all of it.",
        "SHARE",
    )
    kv_cache_dtype: CacheDtype = setting(
        Group.MEMORY,
        "auto",
        "Data type of the KV cache. auto: the model's. fp8 (the device's) and int8 take less, nvfp4 the least.",
    )
    block_size: PageSize | None = setting(
        Group.MEMORY, None, "Tokens per block of the KV cache. Default: the platform's choice."
    )
    enable_prefix_caching: bool = setting(
        Group.MEMORY, True, "Reuse the KV cache of earlier requests whose prompts begin with the same tokens."
    )

    max_model_len: Count | None = setting(
        Group.SCHEDULING, None, "Longest sequence in tokens, prompt and output together. Default: the model's limit."
    )
    max_num_seqs: NumSeqs = setting(Group.SCHEDULING, 256, "Most sequences that run in one step.")
    max_num_batched_tokens: NumTokens = setting(
        Group.SCHEDULING, 2048, "Most tokens in one step. Longer prompts are split over several steps."
    )
    long_prefill_token_threshold: Index | None = setting(
        Group.SCHEDULING,
        None,
        "A prompt with more uncached tokens than this shares each step with other requests of its priority. Default: "
        "--max-num-batched-tokens. 0: it takes every token.",
    )
    max_num_partial_prefills: Count = setting(
        Group.SCHEDULING,
        4,
        "Largest number of prompts above --long-prefill-token-threshold, of the same or a higher priority, that are "
        "read at the same time. Shorter prompts may start before them.",
    )
    async_scheduling: bool | None = setting(
        Group.SCHEDULING,
        None,
        "Submit the next step before the tokens of the running step are known. Default: on for accelerators and for "
        "pipeline stages.",
    )

    tensor_parallel_size: Count = setting(Group.PARALLELISM, 1, "Number of devices (ranks) that share each layer.")
    pipeline_parallel_size: Count = setting(
        Group.PARALLELISM,
        1,
        "Number of pipeline stages. The model's layers are divided among them; each stage has --tensor-parallel-size "
        "ranks.",
    )
    pipeline_parallel_layers: Counts = setting(
        Group.PARALLELISM,
        (),
        "Number of decoder layers on each pipeline stage, as 10,12,10. Default: by the bytes of their weights.",
        "N,N",
    )
    data_parallel_size: Count = setting(
        Group.PARALLELISM,
        1,
        "Number of replicas: each has the whole model, a KV cache and devices of its own, and serves a part of the "
        "requests. With --enable-expert-parallel they share the experts.",
    )
    data_parallel_size_local: Count | None = setting(
        Group.PARALLELISM,
        None,
        "Number of replicas that this server has; others run elsewhere, behind the same load balancer. Default: all.",
    )
    data_parallel_start_rank: Index | None = setting(
        Group.PARALLELISM, None, "Number of this server's first replica among all. Default: 0."
    )
    data_parallel_rank: Index | None = setting(
        Group.PARALLELISM,
        None,
        "Serve the replica of this number alone. Short for --data-parallel-start-rank with --data-parallel-size-local "
        "1.",
    )
    data_parallel_address: Text | None = setting(
        Group.PARALLELISM,
        None,
        "Host of the server that has replica 0, where the replicas of several servers meet that share experts. All "
        "servers need the same.",
        "HOST",
    )
    data_parallel_rpc_port: Port = setting(
        Group.PARALLELISM,
        29550,
        "Port of --data-parallel-address. It asks for no password: keep it off networks that you do not trust.",
        "PORT",
    )
    enable_expert_parallel: bool = setting(
        Group.PARALLELISM,
        False,
        "Give each rank whole experts of a mixture, instead of a slice of every expert. The ranks of all replicas "
        "share the experts.",
    )
    expert_parallel_size: Count | None = setting(
        Group.PARALLELISM,
        None,
        "Number of groups that the ranks of a replica are divided into. Each group holds other experts, and each rank "
        "of a group a slice of them. Each replica then holds all experts itself.",
    )
    enable_eplb: bool = setting(
        Group.PARALLELISM,
        False,
        "Move experts between ranks while serving, so that all have about the same work.",
    )
    num_redundant_experts: Index = setting(
        Group.PARALLELISM,
        0,
        "With --enable-eplb: number of additional expert copies in each layer, on all ranks together.",
    )
    eplb_step_interval: Count = setting(
        Group.PARALLELISM,
        3000,
        "With --enable-eplb: number of steps after which experts move between ranks again, to even their load.",
    )
    eplb_window_size: Count = setting(
        Group.PARALLELISM, 1000, "With --enable-eplb: number of newest steps whose tokens count."
    )
    all2all_backend: Text | None = setting(
        Group.PARALLELISM,
        None,
        "Implementation that sends tokens to the ranks of their experts, and results back.",
        "NAME",
    )
    communicator: Text | None = setting(
        Group.PARALLELISM, None, "Implementation of collectives between ranks, such as all-reduce.", "NAME"
    )
    executor: ExecutorKind | None = setting(
        Group.PARALLELISM,
        None,
        "inproc: one rank, in the engine's process. mp: a process for each rank, on this host. ray: an actor of a "
        "Ray cluster for each rank. torchrun: ranks are started by torchrun. Default: inproc for one rank, mp for "
        "several.",
    )

    attention_backend: Text | None = setting(
        Group.KERNELS,
        None,
        "Attention kernel, for every kind of attention that it offers. One kind: --use attention.KIND=NAME.",
        "NAME",
    )
    linear_backend: Text | None = setting(Group.KERNELS, None, "Matrix-multiplication kernel of linear layers.", "NAME")
    experts_backend: Text | None = setting(Group.KERNELS, None, "Kernel of mixture-of-experts layers.", "NAME")
    use: Use = Field(
        default_factory=dict,
        description="Choose an implementation by name, such as op.rms_norm=NAME. Repeatable.",
        json_schema_extra={"group": Group.KERNELS, "metavar": "FAMILY[.OF]=NAME"},
    )
    deny: Deny = setting(
        Group.KERNELS,
        (),
        "Implementations that must not be chosen, such as op.rms_norm=NAME,linear=NAME.",
        "CHOICE,...",
    )
    custom_ops: CustomOps = setting(
        Group.KERNELS,
        ("all",),
        "Ops that may use kernels of plugins: all or none, then +OP to add, -OP to remove.",
        "OP,...",
    )
    tuning_file: Text | None = setting(
        Group.KERNELS,
        None,
        "File of measured kernel timings (from 'hardpoint tune'); overrides plugin priorities.",
        "FILE",
    )
    tuning_tables: Text | None = setting(
        Group.KERNELS,
        None,
        "Folder of tuning tables (tile sizes of kernels); overrides the tables that plugins ship.",
        "FOLDER",
    )
    batch_invariant: bool = setting(
        Group.KERNELS, False, "Make each output independent of the other requests in the batch, to the bit. Slower."
    )
    enforce_eager: bool = setting(Group.KERNELS, False, "Run without captured graphs and compilation. Slower.")
    compile: bool = setting(
        Group.KERNELS,
        False,
        "Compile the operators between a model's layers (minutes at the first start). For --model-impl transformers.",
    )
    compile_cache: Text | None = setting(
        Group.KERNELS,
        None,
        "Folder of compiled code, which nobody else may write to. Default: ~/.cache/hardpoint/compiled.",
        "FOLDER",
    )
    wait_for_kernels: bool = setting(
        Group.KERNELS,
        False,
        "Wait while libraries build kernels (minutes). Default: start with other kernels and switch later.",
    )
    wait_for_graphs: bool = setting(
        Group.KERNELS,
        False,
        "Capture all graphs before the start ends (seconds). Default: a few, and the others while the engine is idle.",
    )

    plugins: Names | None = setting(Group.PLUGINS, None, "Allowlist: no other plugin is imported.")
    plugins_locked: bool = setting(
        Group.PLUGINS, False, "Refuse plugins whose files differ from the lock file (from 'hardpoint plugins lock')."
    )
    plugins_lock_file: Text = setting(
        Group.PLUGINS, LOCK_FILE_NAME, "File that 'hardpoint plugins lock' wrote, for --plugins-locked.", "FILE"
    )
    require_certified: bool = setting(
        Group.PLUGINS,
        False,
        "Use only kernels that the conformance kit certified at level full or better on this kind of device.",
    )
    certificates: Text | None = setting(
        Group.PLUGINS,
        None,
        "Folder to read certificates from, in place of the plugins' own folders and ./hardpoint-certificates.",
        "FOLDER",
    )

    speculative_method: Text | None = setting(
        Group.SPECULATION,
        None,
        "Method that drafts tokens, which the model then verifies in one step: ngram, or a plugin's. Default: none.",
        "NAME",
    )
    num_speculative_tokens: Count = setting(Group.SPECULATION, 4, "Most tokens drafted per request and step.")
    prompt_lookup_min: Count = setting(
        Group.SPECULATION, 2, "Shortest repeated piece of text that ngram drafts from, in tokens."
    )
    prompt_lookup_max: Count = setting(
        Group.SPECULATION, 4, "Longest repeated piece of text that ngram looks for, in tokens."
    )

    enable_lora: bool = setting(Group.ADAPTERS, False, "Serve LoRA adapters beside the base model.")
    max_loras: Count = setting(Group.ADAPTERS, 1, "Largest number of LoRA adapters loaded at once.")
    max_lora_rank: Count = setting(Group.ADAPTERS, 16, "Highest rank of a LoRA adapter; memory is reserved for it.")
    lora_modules: LoraModules = setting(Group.ADAPTERS, (), "LoRA adapters to load at startup.", "NAME=PATH,...")

    core_process: bool | None = setting(
        Group.FAILURES,
        None,
        "Run scheduler and model in a process of their own. Default: on for serve and AsyncEngine, off for LLM.",
    )
    core_start_timeout: Count = setting(
        Group.FAILURES,
        600,
        "Seconds that loading the model may take, and that ranks, replicas and servers wait for each other at startup.",
    )
    step_timeout: Count = setting(Group.FAILURES, 300, "Seconds after which a step counts as hung: the engine fails.")
    on_engine_failure: OnFailure | None = setting(
        Group.FAILURES,
        None,
        "fail: end open requests with an error. restart: start the engine again and continue them. Default: restart "
        "for serve, else fail.",
    )
    max_engine_restarts: Count = setting(
        Group.FAILURES, 5, "Most restarts within --engine-restart-window; after more, the engine stays down."
    )
    engine_restart_window: Count = setting(
        Group.FAILURES, 600, "Length in seconds of the window in which restarts are counted."
    )

    shadow_check: Share = setting(
        Group.DEBUGGING,
        0.0,
        "Share of op calls (0 to 1) to repeat by the reference; differences are logged. Needs --enforce-eager.",
        "NUMBER",
    )
    blame_ops: bool = setting(
        Group.DEBUGGING,
        False,
        "Synchronise after every op so that a crash names the kernel at fault. Slow. Needs --enforce-eager.",
    )

    plugin_config: dict[str, dict[str, ConfigValue]] = Field(
        default_factory=dict, description="The plugins' own settings, by plugin and key."
    )
