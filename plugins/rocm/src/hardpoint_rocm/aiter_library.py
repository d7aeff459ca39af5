"""AITER, AMD's library (distribution ``amd-aiter``, module ``aiter``), and its functions as they are called here.

Arguments are passed by name. ``SIGNATURES`` says which, as recorded from AITER's public sources (github.com/ROCm/aiter,
each file with the commit that last changed it); ``supports`` and the first use refuse a library whose functions do not
take them. Nothing of it ran on hardware.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from hardpoint_plugin_api import PlatformError, Reason

_MLA = (
    *("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"),
    *("max_seqlen_q", "sm_scale"),
)

SIGNATURES = {
    # aiter/ops/rmsnorm.py, 0bc300f740e8ac412deb6bc68c23f7a9e582413c
    "rms_norm": ("input", "weight", "epsilon"),
    "rmsnorm2d_fwd_with_add": ("out", "input", "residual_in", "residual_out", "weight", "epsilon"),
    # aiter/ops/gemm_op_a8w8.py, 0006ebde8a078bb8bef51dd28db28dc2822f9c62
    "gemm_a8w8": ("XQ", "WQ", "x_scale", "w_scale", "bias", "dtype"),
    "gemm_a8w8_blockscale": ("XQ", "WQ", "x_scale", "w_scale", "dtype"),
    # aiter/ops/mha.py, 222170e1f9b6e7ad04ea8ecec24326e71ec67d72
    "flash_attn_varlen_func": (
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "logits_soft_cap", "causal", "alibi_slopes", "out"),
    ),
    "mha_batch_prefill_func": (
        *("q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "logits_soft_cap", "causal", "alibi_slopes", "out", "block_table", "seqlen_k"),
    ),
    # aiter/ops/attention.py, 41042f7a85d5d13adce546973031ed280f18e0fc
    "paged_attention_v1": (
        *("out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "block_tables", "cu_query_lens"),
        *("context_lens", "max_context_len", "alibi_slopes", "kv_cache_dtype", "kv_cache_layout", "logits_soft_cap"),
        *("k_scale", "v_scale"),
    ),
    "pa_fwd_asm": (
        *("Q", "K", "V", "block_tables", "context_lens", "block_tables_stride0", "K_QScale", "V_QScale", "out_"),
    ),
    # aiter/ops/triton/attention/unified_attention.py, 70e9b025a6e16f2901e0d88c3f6700a3f89c7b71
    "ops.triton.attention.unified_attention.unified_attention": (
        *("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal"),
        *("window_size", "block_table", "softcap", "q_descale", "k_descale", "v_descale", "alibi_slopes", "sinks"),
    ),
    # aiter/ops/topk.py, 65a2e34dab0a02d10e4148ce12055365e45bd688
    "top_k_per_row_prefill": (
        *("logits", "rowStarts", "rowEnds", "indices", "values", "numRows", "stride0", "stride1", "k", "stable"),
    ),
    # aiter/ops/triton/attention/fp8_mqa_logits.py, 1b741c0e3ee2278e123a395fb23767ddbf8f8800
    "ops.triton.attention.fp8_mqa_logits.fp8_mqa_logits": (
        *("Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends", "clean_logits"),
    ),
    # aiter/mla.py, 41d6c5271acee849f3968b722d825c9d167ac12f
    "mla.mla_decode_fwd": _MLA,
    "mla.mla_prefill_fwd": _MLA,
    # aiter/fused_moe.py, d78f4797ba4e16927d83f5ede412767dd5430f5a
    "fused_moe.fused_moe": (
        *("hidden_states", "w1", "w2", "topk_weight", "topk_ids", "activation", "quant_type", "w1_scale", "w2_scale"),
        "dtype",
    ),
    # aiter/ops/quick_all_reduce.py, 4f5c2ba6229cfdb750fc68d9d19815b37ad5a06d
    "init_custom_qr": ("rank", "world_size", "qr_max_size"),
    "qr_get_handle": ("fa", "out_ptr"),
    "qr_open_handles": ("fa", "handle_ptrs"),
    "qr_all_reduce": ("fa", "inp", "out", "quant_level", "cast_bf2half"),
    "qr_destroy": ("fa",),
    # aiter/ops/triton/gemm/basic/gemm_afp4wfp4.py, 01423766152c2cf08d7d7bdccae00a221f2da876
    "ops.triton.gemm.basic.gemm_afp4wfp4.gemm_afp4wfp4": ("x", "w", "x_scales", "w_scales", "dtype"),
    # aiter/ops/shuffle.py, b0b6945e7aff0b0c0860d225501440c81df1f361
    "ops.shuffle.shuffle_weight": ("x", "layout"),
    # aiter/utility/fp4_utils.py, 0b3d71613304c12fdc3e1a324d0f1a67a3875684
    "utility.fp4_utils.e8m0_shuffle": ("scale",),
}
"""The arguments that are passed to each function; all others have defaults. Names are below the module ``aiter``."""

FIX = "install the amd-aiter that was built for this ROCm and PyTorch, or leave it out: other kernels serve then"


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """AITER's function. Raises PlatformError where AITER cannot be imported, lacks it, or wants other arguments."""
    if found := reason_against(name):
        raise PlatformError(str(found))
    taken: Callable[..., Any] = _find(name)
    return taken


def reason_against(name: str) -> Reason | None:
    """Why AITER's function ``name`` cannot be called as recorded; None where it can."""
    try:
        taken = _find(name)
    except Exception as error:  # it loads compiled code, and asks the device
        return Reason("aiter-import", f"AITER cannot be imported: {error}", fix=FIX)
    if taken is None:
        return Reason("aiter-function", f"this AITER has no function {name}", fix=FIX)
    parameters = inspect.signature(taken).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # torch's operators do not say
        return None
    known, needed = {p.name for p in parameters}, {p.name for p in parameters if p.default is p.empty}
    passed = set(SIGNATURES[name])
    if passed <= known and needed <= passed:
        return None
    wanted, supported = ", ".join(SIGNATURES[name]), ", ".join(p.name for p in parameters)
    return Reason("aiter-signature", f"{name} of this AITER takes other arguments", wanted, supported, FIX)


def reasons_against(*names: str) -> list[Reason]:
    """``reason_against`` of each function, for those that have one."""
    return [reason for name in names if (reason := reason_against(name))]


def constant(name: str) -> Any:
    """AITER's enumeration ``name``. Raises PlatformError where there is none."""
    if (found := _find(name)) is None:
        raise PlatformError(f"this AITER has no {name}; {FIX}")
    return found


def _find(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"aiter.{module}" if module else "aiter"), own, None)
