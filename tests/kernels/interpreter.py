"""Triton's interpreter, switched on for this process alone, and what it gets wrong put right.

Triton asks ``TRITON_INTERPRET`` when it defines a kernel, its own functions among them, and hands the variable on to
child processes. Neither suits a test process, in which torch may have imported Triton long before. So here kernels that
were defined to be compiled are interpreted when they are called.

In 3.7.1 the interpreter holds bfloat16 and 8-bit floats as integers of their bits, and multiplies those in ``tl.dot``;
adds and multiplies them so elsewhere too; it takes integers to bfloat16 by their bits; and it cuts off where devices
round to the nearest, ties to even.

Half of its time goes to results that it computes again for each value: the shape in the terms of the language, NumPy's
name of a type, and whether a sum of integers overflows. The last it tells nobody: that is an assertion of debug mode.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADDRESS = np.dtype(np.uint64)
_AS_BITS = ("bf16", "fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16")
"""The types whose elements the interpreter holds as integers."""

_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot
_binary_op = interpreter.InterpreterBuilder.binary_op
_create_fma = interpreter.InterpreterBuilder.create_fma
_number_type = functools.cache(interpreter._get_np_dtype)
_rewrite = interpreter.InterpretedFunction.rewrite
_REWRITING = threading.Lock()


def interpret() -> None:
    """From now on this process interprets kernels, on tensors of the host."""
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    JITFunction.run = lambda self, *args, **kwargs: _interpreted(self.fn).run(*args, **kwargs)
    JITFunction.__call__ = lambda self, *args, **kwargs: _interpreted(self.fn)(*args, **kwargs)
    # The interpreter replaces the language's functions before each call of a function, and puts them back after a
    # kernel, which takes most of its time. Here they may stay.
    interpreter._patch_lang(lambda: (tl, core))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.InterpretedFunction.rewrite = _rewritten
    interpreter._convert_float = _converted
    interpreter.InterpreterBuilder.cast_impl = _cast
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.get_bf16 = _constant
    interpreter.InterpreterBuilder.binary_op = _binary
    interpreter.InterpreterBuilder.create_fma = _fma
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._get_np_dtype = _numpy_type
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block
    core.block_type.__eq__ = _is_same_block
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Any:
    return interpreter.InterpretedFunction(function)


def _rewritten(function: Any) -> Any:
    """As the interpreter does it, one thread at a time: Python 3.11 counts the depth of syntax trees for all threads
    together, and some that were parsed at once failed ("AST constructor recursion depth mismatch")."""
    if function.fn in function.rewritten_fn:
        return function.rewritten_fn[function.fn]
    with _REWRITING:
        return _rewrite(function)


def _numpy_type(kind: Any) -> Any:
    scalar = kind.scalar
    return _ADDRESS if isinstance(scalar, tl.pointer_type) else _number_type(scalar)


def _init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    """As the language does it."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _shape_and_size(kind.shape if kind.is_block() else ())


def _init_block(block: Any, element: Any, shape: Any) -> None:
    """As the language does it, but for the name, which is written when it is asked for."""
    block.element_ty = element
    block.shape, block.numel = _checked_shape(tuple(core._unwrap_shape(shape)))


@functools.cache
def _checked_shape(shape: tuple[int, ...]) -> tuple[Any, int]:
    if not shape:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(shape), core.validate_block_shape(shape)


def _is_same_block(block: Any, other: object) -> bool:
    if not isinstance(other, core.block_type):
        return False
    return bool(block.element_ty == other.element_ty and block.shape.values == other.shape.values)


@functools.cache
def _shape_and_size(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))


def _converted(bits: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Rounds as torch does: what is too large for an 8-bit float becomes NaN, so that a missing clamp shows."""
    if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        return _convert_float(bits, source, target, rounding)
    numbers = torch.from_numpy(np.array(bits)).view(_TORCH[source.name])
    found = numbers.to(_TORCH[target.name])
    return found.view(_BITS[found.element_size()]).numpy().view(f"uint{8 * found.element_size()}")


def _cast(builder: Any, source: Any, target: Any) -> Any:
    of, to = source.dtype.scalar, target.scalar
    data = source.data
    if of.name in _AS_BITS:
        data = _converted(data, of, tl.float32, None).view(np.float32)
    if to.name in _AS_BITS:
        data = _converted(data.astype(np.float32), tl.float32, to, None)
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target)), to)


def _dot(builder: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    a, b = (_cast(builder, x, tl.float32) if x.dtype.scalar.name in _AS_BITS else x for x in (a, b))
    return _create_dot(builder, a, b, d, *precision)


def _constant(builder: Any, value: float) -> Any:
    return _cast(builder, interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.bfloat16)


def _binary(builder: Any, a: Any, b: Any, op: Callable[..., Any]) -> Any:
    """A comparison's results are no numbers of the operands' type, though the interpreter says so."""
    of = a.dtype.scalar
    if of.name not in _AS_BITS:
        return _binary_op(builder, a, b, op)
    found = _binary_op(builder, *(_cast(builder, x, tl.float32) for x in (a, b)), op)
    return _cast(builder, found, of) if found.data.dtype == np.float32 else found


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounded once: the product of two numbers is exact in the next wider type, as is its sum in what kernels do."""
    of = z.dtype.scalar
    if of.name == "fp32":
        return _cast(builder, _create_fma(builder, *(_cast(builder, part, tl.float64) for part in (x, y, z))), of)
    if of.name not in _AS_BITS:
        return _create_fma(builder, x, y, z)
    return _cast(builder, _create_fma(builder, *(_cast(builder, part, tl.float32) for part in (x, y, z))), of)
