"""Intel's kernels for vLLM (distribution ``vllm-xpu-kernels``), and its operators as they are called here.

Arguments are passed by name. ``SCHEMAS`` are the operators' texts in the compiled modules of 0.1.16.2 from the public
index, and ``FLASH_PARAMETERS`` the parameters of its Python function for attention. Both are looked up in the installed
files without loading them: the modules link to a driver, and open the device. Nothing of it ran on hardware.
"""

from __future__ import annotations

import ast
import functools
import importlib
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import importlib_metadata
import torch

from hardpoint_plugin_api import PlatformError, Reason
from hardpoint_plugin_api.distributions import locate_module

DISTRIBUTION = "vllm-xpu-kernels"
PACKAGE = "vllm_xpu_kernels"
SCHEMAS = {
    "_C.rms_norm": "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "_C.fused_add_rms_norm": (
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()"
    ),
    "_C.silu_and_mul": "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "_C.gelu_and_mul": "gelu_and_mul(Tensor! out, Tensor input) -> ()",
    "_C.gelu_tanh_and_mul": "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()",
    "_xpu_C.fp8_gemm_w8a16": "fp8_gemm_w8a16(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor",
    "_xpu_C.fp8_gemm": (
        "fp8_gemm(Tensor A, Tensor B, ScalarType? out_dtype, Tensor? A_scale_, Tensor? B_scale_, Tensor? bias_)"
        " -> Tensor"
    ),
    "_xpu_C.int4_gemm_w4a16": (
        "int4_gemm_w4a16(Tensor A, Tensor B, Tensor? bias, Tensor B_scale, Tensor B_zp, int group_size, Tensor? g_idx)"
        " -> Tensor"
    ),
    "_xpu_C.cutlass_grouped_gemm_interface": (
        "cutlass_grouped_gemm_interface(Tensor ptr_A, Tensor? ptr_A_scale, Tensor ptr_B, Tensor? ptr_B_scale, "
        "Tensor? ptr_bias, Tensor ptr_D, Tensor rows_per_expert, int N, int K, int num_experts) -> Tensor"
    ),
    "_moe_C.remap_hidden_states": (
        "remap_hidden_states(Tensor hidden_states, Tensor? hidden_states_scales, Tensor remapped_hidden_states,"
        "Tensor? remapped_hidden_states_scales,Tensor? expert_map, Tensor rows_per_expert,"
        "Tensor unpermuted_row_to_permuted_row, Tensor topk_ids,int total_experts_num, int local_experts_num) -> ()"
    ),
    "_moe_C.moe_gather": (
        "moe_gather(Tensor! output, Tensor moe_output, Tensor topk_weights, Tensor unpermuted_row_to_permuted_row, "
        "int num_experts) -> ()"
    ),
}
"""The text of each operator, by module and name."""

FLASH = "flash_attn_varlen_func"
_FLASH_FILE = "flash_attn_interface.py"
FLASH_PARAMETERS = (
    *("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale", "causal"),
    *("block_table", "out", "is_mix_batch"),
)
"""The parameters that are passed to ``flash_attn_varlen_func``; all others have defaults."""

_FIX = f"pip install '{DISTRIBUTION}==0.1.16.2', or leave it out: other kernels serve then"


def reasons_against(*names: str) -> list[Reason]:
    """Why the operators ``names``, or ``FLASH``, cannot be called as recorded. Nothing is loaded."""
    try:
        distribution = importlib_metadata.Distribution.from_name(DISTRIBUTION)
    except importlib_metadata.PackageNotFoundError:
        return [Reason("package-missing", f"package {DISTRIBUTION} is not installed", fix=_FIX)]
    package = locate_module(distribution, PACKAGE)
    if isinstance(package, Reason):
        return [package]
    found = (_flash_reason(package) if name == FLASH else _schema_reason(package, name) for name in names)
    return [reason for reason in found if reason]


def operator(name: str) -> Callable[..., Any]:
    """The operator ``MODULE.NAME``. Raises PlatformError where its module cannot be loaded."""
    module, _, own = name.partition(".")
    _load(module)
    found: Callable[..., Any] = getattr(getattr(torch.ops, module), own)
    return found


def flash_attention() -> Callable[..., Any]:
    """``flash_attn_varlen_func``. Raises PlatformError where the package cannot be loaded."""
    found: Callable[..., Any] = getattr(_load(Path(_FLASH_FILE).stem), FLASH)
    return found


@functools.cache
def _load(module: str) -> Any:
    try:
        return importlib.import_module(f"{PACKAGE}.{module}")
    except Exception as error:  # it loads compiled code, which looks for the driver
        raise PlatformError(f"{PACKAGE}.{module} cannot be loaded: {error}; {_FIX}") from error


@functools.cache
def _schema_reason(package: Path, name: str) -> Reason | None:
    module, _, own = name.partition(".")
    schema = SCHEMAS[name].encode()
    for file in sorted(package.glob(f"{module}.*")):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(schema) >= 0:
                return None
            if other := re.search(rb"(?<!\w)%b\(Tensor[^\0\n]*" % own.encode(), text):
                message, has = f"{own} of this {DISTRIBUTION} takes other arguments", other[0].decode(errors="replace")
                return Reason("schema", message, wanted=SCHEMAS[name], supported=has, fix=_FIX)
    return Reason("schema", f"this {DISTRIBUTION} has no operator {own}", wanted=SCHEMAS[name], fix=_FIX)


@functools.cache
def _flash_reason(package: Path) -> Reason | None:
    file = package / _FLASH_FILE
    tree = ast.parse(file.read_text() if file.is_file() else "")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FLASH]
    if not functions:
        return Reason("schema", f"this {DISTRIBUTION} has no function {FLASH}", fix=_FIX)
    arguments = functions[-1].args
    known = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    needed = known[: len(arguments.args) - len(arguments.defaults)]
    if {*FLASH_PARAMETERS} <= {*known} and {*needed} <= {*FLASH_PARAMETERS}:
        return None
    message = f"{FLASH} of this {DISTRIBUTION} takes other arguments"
    return Reason("schema", message, wanted=", ".join(FLASH_PARAMETERS), supported=", ".join(known), fix=_FIX)
