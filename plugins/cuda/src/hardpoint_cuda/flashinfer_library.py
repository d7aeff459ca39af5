"""FlashInfer's requirements, checked without importing it, and its kernels, built or loaded at start.

FlashInfer's attention kernels come one library for each dtype, head size and set of features; what ranks share is one
more, and so is its product of 8-bit floats. A library is found ahead of time (in the package ``flashinfer-jit-cache``,
or under ``data/aot`` of FlashInfer's own), or compiled with nvcc and ninja when it is first wanted, and then kept in
the user's cache. Written from the sources of 0.6.14 and 0.6.18.
"""

from __future__ import annotations

import ast
import functools
import importlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import importlib_metadata
import torch

from hardpoint.dtypes import dtype_of
from hardpoint_plugin_api import PlatformError, Reason
from hardpoint_plugin_api.distributions import locate_module

logger = logging.getLogger(__name__)

DISTRIBUTION = "flashinfer-python"
_PREBUILT = "flashinfer-jit-cache"
_COMPANIONS = ("flashinfer-cubin", _PREBUILT)
"""Packages that FlashInfer refuses when it is imported, unless they are of its own version."""

_DECODE_PLAN = "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size"
_DECODE_PLAN_OPTIONS = (
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale "
    "rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req"
)
_FAST_PLAN = (
    f"{_DECODE_PLAN} pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale "
    "rope_scale rope_theta non_blocking fixed_split_size disable_split_kv"
)
_DECODE_RUN = (
    "self q paged_kv_cache *args q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks q_len_per_req "
    "skip_softmax_threshold_scale_factor kv_cache_sf"
)
_PREFILL_RUN = (
    "self q paged_kv_cache *args q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks kv_cache_sf "
    "skip_softmax_threshold_scale_factor"
)
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "decode.py:BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "self float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args",
    ),
    "decode.py:BatchDecodeWithPagedKVCacheWrapper.plan": (
        f"{_DECODE_PLAN} {_DECODE_PLAN_OPTIONS}",
        f"{_DECODE_PLAN} *deprecated_positional_args **kwargs",  # since 0.6.18, the options by name
    ),
    "decode.py:BatchDecodeWithPagedKVCacheWrapper.run": (_DECODE_RUN,),
    "decode.py:BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self float_workspace_buffer int_workspace_buffer",
    ),
    "decode.py:fast_decode_plan": (
        f"{_FAST_PLAN} global_override_indptr_cpu",
        f"{_FAST_PLAN} q_len_per_req global_override_indptr_cpu",
    ),
    "prefill.py:BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "self float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
        "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs",
    ),
    "prefill.py:BatchPrefillWithPagedKVCacheWrapper.plan": (
        "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale "
        "window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking "
        "prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q "
        "block_tables max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv",
    ),
    "prefill.py:BatchPrefillWithPagedKVCacheWrapper.run": (
        _PREFILL_RUN,
        f"{_PREFILL_RUN} use_fp16_softmax uses_spcompress",
    ),
    "prefill.py:BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self float_workspace_buffer int_workspace_buffer",
    ),
    "jit/attention/modules.py:gen_batch_prefill_module": (
        "backend dtype_q dtype_kv dtype_o dtype_idx head_dim_qk head_dim_vo pos_encoding_mode use_sliding_window "
        "use_logits_soft_cap use_fp16_qk_reduction",
    ),
}
"""Called functions, by file and name, and their parameters: one line for each known form."""

COMMUNICATION_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "comm/allreduce.py:allreduce_fusion": (
        "input workspace pattern launch_with_pdl trigger_completion_at_end output residual_out norm_out quant_out "
        "scale_out residual_in rms_gamma rms_eps scale_factor layout_code use_oneshot fp32_acc "
        "moe_reduction_device_num_experts moe_reduction_scale_input moe_reduction_active_experts_token_input "
        "moe_reduction_token_input expanded_idx_to_permuted_idx expert_scale_factor shared_expert_output "
        "block_quant_group_size weight_bias",
    ),
    "comm/allreduce.py:TRTLLMAllReduceFusionWorkspace.__init__": (
        "self tp_size tp_rank max_token_num hidden_dim dtype comm_backend group",
    ),
    "comm/workspace_base.py:AllReduceFusionWorkspace.__init__": ("self world_size rank",),
    "comm/trtllm_ar.py:trtllm_create_ipc_workspace_for_all_reduce_fusion": (
        "tp_rank tp_size max_token_num hidden_dim use_fp32_lamport group create_metadata comm_backend use_symm_dev_mem",
    ),
    "comm/trtllm_ar.py:check_trtllm_allreduce_fusion_workspace_metadata": (
        "token_num hidden_dim world_size dtype metadata",
    ),
}
"""The same for what ranks share; among it whose memory is laid out here as there."""

PRODUCT_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "gemm/gemm_base.py:fp8_blockscale_gemm_sm90": ("input weight input_scale weight_scale out out_dtype",),
    "gemm/gemm_base.py:get_fp8_blockscale_gemm_runner_sm90": ("",),
    "jit/gemm/fp8_blockscale.py:gen_fp8_blockscale_gemm_sm90_module": ("use_fast_build",),
}
"""The same for the product of 8-bit floats: FlashInfer's function, and what of it is called here in its place."""

LATENT_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "mla/_core.py:BatchMLAPagedAttentionWrapper.__init__": (
        "self float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend",
    ),
    "mla/_core.py:BatchMLAPagedAttentionWrapper.plan": (
        "self qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale "
        "q_data_type kv_data_type use_profiler",
    ),
    "mla/_core.py:BatchMLAPagedAttentionWrapper.run": (
        "self q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table "
        "return_lse_base_on_e o_scale ckv_scale kpe_scale",
    ),
    "jit/attention/modules.py:gen_batch_mla_module": (
        "backend dtype_q dtype_kv dtype_o dtype_idx head_dim_ckv head_dim_kpe use_profiler",
    ),
}
"""The same for latent attention."""

_SHORT = {"float16": "f16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Kernel:
    """One library: ``backend`` is ``fa2`` (any architecture from sm_80 on) or ``fa3`` (sm_90)."""

    backend: str
    dtype: str
    head_size: int
    window: bool
    soft_cap: bool

    @property
    def name(self) -> str:
        """FlashInfer's name of it; its file is ``NAME/NAME.so``."""
        short, size = _SHORT[self.dtype], self.head_size
        return (
            f"batch_prefill_with_kv_cache_dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32_"
            f"head_dim_qk_{size}_head_dim_vo_{size}_posenc_0_use_swa_{self.window}_use_logits_cap_{self.soft_cap}_"
            f"f16qk_False{'_sm90' if self.backend == 'fa3' else ''}"
        )

    @property
    def signatures(self) -> Mapping[str, tuple[str, ...]]:
        """The signatures of FlashInfer's functions that are called for it."""
        return SIGNATURES

    def generate(self) -> Any:
        """FlashInfer's own description of the module."""
        dtype = dtype_of(self.dtype)
        return module("flashinfer.jit").gen_batch_prefill_module(
            backend=self.backend,
            dtype_q=dtype,
            dtype_kv=dtype,
            dtype_o=dtype,
            dtype_idx=torch.int32,
            head_dim_qk=self.head_size,
            head_dim_vo=self.head_size,
            pos_encoding_mode=0,
            use_sliding_window=self.window,
            use_logits_soft_cap=self.soft_cap,
            use_fp16_qk_reduction=False,
        )

    def load(self) -> None:
        """Build it where it is not built yet, which takes a minute or so, and load it.

        Raises PlatformError with the end of what the compiler says.
        """
        _load(self)


@dataclass(frozen=True)
class LatentKernel:
    """One library of latent attention: ``backend`` as of Kernel."""

    backend: str
    dtype: str
    latent_size: int
    rope_size: int

    @property
    def name(self) -> str:
        """FlashInfer's name of the module."""
        short = _SHORT[self.dtype]
        return (
            f"batch_mla_attention_dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32_head_dim_ckv_"
            f"{self.latent_size}_head_dim_kpe_{self.rope_size}_profiler_False{'_sm90' if self.backend == 'fa3' else ''}"
        )

    @property
    def signatures(self) -> Mapping[str, tuple[str, ...]]:
        """The signatures of FlashInfer's functions that are called for it."""
        return LATENT_SIGNATURES

    def generate(self) -> Any:
        """FlashInfer's own description of the module."""
        dtype = dtype_of(self.dtype)
        return module("flashinfer.jit").gen_batch_mla_module(
            backend=self.backend,
            dtype_q=dtype,
            dtype_kv=dtype,
            dtype_o=dtype,
            dtype_idx=torch.int32,
            head_dim_ckv=self.latent_size,
            head_dim_kpe=self.rope_size,
            use_profiler=False,
        )

    def load(self) -> None:
        """Build it where it is not built yet, and load it. Raises PlatformError."""
        _load(self)


@dataclass(frozen=True)
class Communication:
    """The one library of what ranks share, for sm_90 and sm_100. Compiling it takes some four minutes on two cores."""

    name: str = "trtllm_comm"

    @property
    def signatures(self) -> Mapping[str, tuple[str, ...]]:
        """The signatures of FlashInfer's functions that are called for it."""
        return COMMUNICATION_SIGNATURES

    def generate(self) -> Any:
        """FlashInfer's own description of the module."""
        return module("flashinfer.jit.comm").gen_trtllm_comm_module()

    def load(self) -> None:
        """Build it where it is not built yet, and load it. Raises PlatformError."""
        _load(self)


@dataclass(frozen=True)
class Product:
    """The one library of products of 8-bit floats with scales of blocks, for sm_90: a minute and a half on two cores.

    DeepGEMM in it compiles a kernel for each weight's widths and way of cutting a product, some seconds each, with the
    ``nvcc`` of CUDA_HOME or PATH, and keeps it in ``kernels``.
    """

    name: str = "fp8_blockscale_gemm_90"

    @property
    def signatures(self) -> Mapping[str, tuple[str, ...]]:
        """The signatures of FlashInfer's functions that are called for it."""
        return PRODUCT_SIGNATURES

    @property
    def kernels(self) -> Path:
        """Where DeepGEMM keeps its kernels, and others that it is to find may be put, in ``cache``.

        Files there are named by sizes alone, and DeepGEMM's own choice is one folder for every version of it and of
        TensorRT-LLM: one of FlashInfer's, by version, takes its place where the user has chosen none.
        """
        if given := os.environ.get(_DEEP_GEMM_FOLDER):
            return Path(given)
        base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
        return base / ".cache" / "flashinfer" / importlib_metadata.version(DISTRIBUTION) / "deep_gemm"

    def compiler(self) -> str | None:
        """The ``nvcc`` that DeepGEMM would start, if there is one where it looks; that is not where FlashInfer does."""
        home = os.environ.get("CUDA_HOME")
        default = str(Path(home, "bin", "nvcc")) if home else "nvcc"
        return shutil.which(os.environ.get("TRTLLM_DG_NVCC_COMPILER") or default)

    def generate(self) -> Any:
        """FlashInfer's own description of the module."""
        return module("flashinfer.jit.gemm").gen_fp8_blockscale_gemm_sm90_module()

    def load(self) -> None:
        """Build it where it is not built yet, and load it, with its folder made. Raises PlatformError.

        DeepGEMM makes the folder when the library is loaded, where failing would end the process.
        """
        folder = self.kernels
        try:
            for name in ("tmp", "cache"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlatformError(f"FlashInfer has nowhere to keep kernels: {error}; set {_DEEP_GEMM_FOLDER}") from error
        os.environ[_DEEP_GEMM_FOLDER] = str(folder)  # the one way to tell it
        _load(self)


_DEEP_GEMM_FOLDER = "TRTLLM_DG_CACHE_DIR"

COMMUNICATION = Communication()
PRODUCT = Product()
Library = Kernel | LatentKernel | Communication | Product


def reasons(kernels: frozenset[Library]) -> list[Reason]:
    """Why FlashInfer, which is installed in a suitable version, would fail here when ``kernels`` are wanted."""
    distribution = importlib_metadata.Distribution.from_name(DISTRIBUTION)
    package = locate_module(distribution, "flashinfer")
    if isinstance(package, Reason):
        return [package]
    found = list(_companions(distribution.version))
    called = {key: forms for kernel in kernels for key, forms in kernel.signatures.items()}
    if difference := signature_differences(package, called):
        found.append(
            Reason(
                "signature",
                f"{DISTRIBUTION} {distribution.version} has other functions than this adapter was written for: "
                + "; ".join(difference),
                fix=f"pip install '{DISTRIBUTION}==0.6.14', or update hardpoint-cuda",
            )
        )
    absent = [kernel.name for kernel in kernels if not is_ahead_of_time(kernel, package)]
    if absent and (lacking := list(_lacking_tools())):
        found.append(
            Reason(
                "flashinfer-kernels",
                f"FlashInfer has no compiled {min(absent)}, and cannot compile it without {' and '.join(lacking)}",
                fix=f"install a CUDA toolkit and ninja, or the package {_PREBUILT} of version {distribution.version}",
            )
        )
    return found


def _companions(version: str) -> Iterator[Reason]:
    for name in _COMPANIONS:
        try:
            other = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
        if other.partition("+")[0] != version:
            message = f"{name} is of another version than {DISTRIBUTION}, which refuses it"
            yield Reason("version-mismatch", message, wanted=version, supported=other, fix=f"pip uninstall {name}")


def signature_differences(package: Path, signatures: Mapping[str, tuple[str, ...]] = SIGNATURES) -> tuple[str, ...]:
    """How the sources in ``package`` differ from ``signatures``, a text for each function that does.

    The sources are parsed, not imported: FlashInfer opens the device when it is imported.
    """
    texts = []
    for key, known in signatures.items():
        file, _, name = key.partition(":")
        parameters = _parameters(package / file, name)
        if parameters is None:
            texts.append(f"{name} is missing")
        elif all(parameters != form.split() for form in known):
            form = known[0].split()
            lacks = ", ".join(p for p in form if p not in parameters)
            new = ", ".join(p for p in parameters if p not in form)
            texts.append(f"{name} lacks {lacks or 'nothing'}, and has {new or 'another order'} in addition")
    return tuple(texts)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text() if path.is_file() else "")


def _parameters(path: Path, name: str) -> list[str] | None:
    """Names of a function's parameters, the starred ones with their stars; the last of several definitions counts."""
    body: list[ast.stmt] = _tree(path).body
    *outer, own = name.split(".")
    for part in outer:
        classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        body = classes[-1].body if classes else []
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == own]
    if not functions:
        return None
    arguments = functions[-1].args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def is_ahead_of_time(kernel: Library, package: Path) -> bool:
    """Whether the library is there ahead of time. One in the user's cache is none: FlashInfer has ninja look at it."""
    roots = [package / "data"]
    try:
        prebuilt = locate_module(importlib_metadata.Distribution.from_name(_PREBUILT), "flashinfer_jit_cache")
    except importlib_metadata.PackageNotFoundError:
        pass
    else:
        roots += [] if isinstance(prebuilt, Reason) else [prebuilt]
    return any((folder / kernel.name / f"{kernel.name}.so").is_file() for root in roots for folder in _folders(root))


def _folders(root: Path) -> list[Path]:
    return [root / "aot", root / "jit_cache", root]


def _lacking_tools() -> Iterator[str]:
    """Parts of a compiler that FlashInfer would not find, looking where it looks."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if not (os.environ.get("FLASHINFER_NVCC") or shutil.which("nvcc") or (Path(home) / "bin" / "nvcc").is_file()):
        yield "nvcc"
    if not shutil.which("ninja"):
        yield "ninja"
    if not shutil.which(os.environ.get("CXX") or "c++"):
        yield "a C++ compiler"


def module(name: str) -> Any:
    """Import a module of FlashInfer. Raises PlatformError with what its import says, for which nothing is known."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # its import looks at devices, compilers, caches and other packages
        raise PlatformError(
            f"FlashInfer is installed and cannot be imported: {type(error).__name__}: {error}; "
            "see its own documentation, or choose another attention backend"
        ) from error


@functools.cache
def _load(kernel: Library) -> None:
    try:
        spec = kernel.generate()
        if not spec.is_compiled:
            logger.info("FlashInfer compiles %s, which takes minutes and is kept", kernel.name)
        spec.build_and_load()
    except Exception as error:  # compilers fail in many ways
        raise PlatformError(
            f"FlashInfer cannot build {kernel.name}: {str(error)[-1500:]}; choose what does without, or install the "
            f"package {_PREBUILT}"
        ) from error
