"""The launcher takes the variant that Triton itself would take, whatever the arguments are."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from hardpoint import kernels, ops
from hardpoint.conformance.memory import Placement, place_far
from hardpoint.kernels import launch, recurrence, state_inputs
from hardpoint.kernels.launch import Launcher, aligned
from tests.kernels.compiling import READ_FIRST
from tests.kernels.judged import DTYPES
from tests.kernels.op_kernels import KERNELS, MODULES, placed


def test_stages_that_fit_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_fitting", {})
    asked = list[int]()

    def run(num_stages: int, most: int) -> str:
        asked.append(num_stages)
        if num_stages > most:
            raise triton.OutOfResources(100 << 10, 99 << 10, "shared memory")
        return f"in {num_stages}"

    assert launch.in_stages_that_fit("large", 4, lambda n: run(n, 4)) == "in 4"
    for _ in range(2):
        assert launch.in_stages_that_fit("small", 4, lambda n: run(n, 2)) == "in 2"
    assert launch.in_stages_that_fit("large", 4, lambda n: run(n, 4)) == "in 4"
    assert asked == [4, 4, 3, 2, 2, 4]
    with pytest.raises(triton.OutOfResources):
        launch.in_stages_that_fit("none", 2, lambda n: run(n, 0))
    with pytest.raises(ZeroDivisionError):
        launch.in_stages_that_fit("wrong", 4, lambda n: 1 // (n - 4))


class Variants:
    """In place of a kernel: says which variant Triton would compile, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        self._bind = create_function_from_signature(
            compiled.signature, compiled.params, make_backend(GPUTarget("cuda", 90, 32))
        )
        self.launched_again = 0
        self.compiled = set[object]()

    def variant(self, *args: Any) -> object:
        _, specialisation, _ = self._bind(*args, debug=False)
        return str(specialisation)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Variant]:
        assert len(grid) == 3

        def compile_(*args: Any, num_warps: int, num_stages: int, BEGIN: None) -> Variant:  # noqa: N803  # a kernel's
            variant = self.variant(*args, BEGIN)
            self.compiled.add(variant)
            return Variant(self, variant)

        return compile_


class Variant:
    """In place of a compiled kernel: launched with arguments that it was not compiled for, it fails."""

    def __init__(self, kernel: Variants, variant: object) -> None:
        self.kernel, self.variant = kernel, variant

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            assert self.kernel.variant(*args) == self.variant
            self.kernel.launched_again += 1

        return launch


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[Variants]:
    found = []
    for module in (*MODULES, *OF_STATES):
        for launcher in launchers_of(module):
            monkeypatch.setattr(launcher, "_kernel", Variants(launcher._kernel))
            monkeypatch.setattr(launcher, "_compiled", {})
            found.append(launcher._kernel)
    return found


def launchers_of(module: ModuleType) -> list[Launcher]:
    return [x for x in vars(module).values() if isinstance(x, Launcher)]


OF_TRITON = {"add_lora"}
"""Ops whose kernels Triton itself launches: their products take long beside a launch."""
LAUNCHED = [(name, kernel) for name, kernel in KERNELS if name not in OF_TRITON]


@pytest.mark.parametrize(("name", "kernel"), LAUNCHED, ids=[name for name, _ in LAUNCHED])
def test_a_key_means_one_variant(name: str, kernel: Any, launchers: list[Variants]) -> None:
    op: Any = ops.get(name)
    for dtype in DTYPES:
        for placement in Placement.AS_DRAWN, Placement.OFFSET, Placement.APART:
            for case in op.cases(torch.Generator().manual_seed(0), dtype, torch.device("cpu")):
                lying = placed(op, case, placement)
                kernel(*lying.args, **lying.kwargs)
                kernel(*lying.args, **lying.kwargs)
    assert sum(launcher.launched_again for launcher in launchers) > 10


OF_STATES = (recurrence, state_inputs)


def rows(*shape: int, far: bool = False) -> torch.Tensor:
    """Two rows; ``far`` ones have a stride of 2**31 elements, and take memory for themselves alone."""
    x = torch.randn(2, *shape)
    return place_far(x, x.device, 2**40) if far else x


def call_of_states(name: str, far: bool, other_far: bool = False) -> None:
    """Call a kernel around a layer's state on two requests of one token, the rows of one input far apart or not, and
    those of another."""
    states, two = torch.zeros(2, 4, 16, 16), torch.arange(2)
    starts, lengths = torch.arange(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    match name:
        case "linear_recurrence_step":
            gates = torch.zeros(2, 4), torch.ones(2, 4), states, two, lengths
            rule: Any = {"scale": 1.0, "delta_rule": True, "normalize": True, "channel_decay": False}
            others = rows(4, 16, far=other_far), rows(4, 16)
            recurrence.linear_recurrence_step(rows(4, 16, far=far), *others, *gates, **rule)
        case "causal_conv":
            arrays = torch.randn(64, 4), None, torch.zeros(2, 3, 64), two, starts, lengths
            state_inputs.causal_conv(rows(64, far=far), *arrays, activation="silu")
        case "recurrence_gates":
            inputs = rows(8, far=other_far), rows(8, far=far), torch.zeros(8), torch.zeros(8)
            state_inputs.recurrence_gates(*inputs, low=0.0)
        case _:
            x, weight = rows(4, 16), torch.ones(1, 16)
            state_inputs.gated_rms_norm(x, rows(64, far=far), weight, eps=1e-6, activation="silu", gate_first=False)


@pytest.mark.parametrize("name", ["linear_recurrence_step", "causal_conv", "recurrence_gates", "gated_rms_norm"])
def test_a_key_tells_strides_of_64_bits(name: str, launchers: list[Variants], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "products_of_floats", lambda device_type: "bf16x6")
    for far in (False, False, True, True):
        call_of_states(name, far)
    assert sum(launcher.launched_again for launcher in launchers) == 2
    assert sum(len(launcher.compiled) for launcher in launchers) == 2
    if name in ("linear_recurrence_step", "recurrence_gates"):
        call_of_states(name, far=False, other_far=True)
        assert sum(len(launcher.compiled) for launcher in launchers) == 3


def test_every_launcher_is_tried() -> None:
    assert len([x for module in (*MODULES, *OF_STATES) for x in launchers_of(module)]) == 17


def test_alignment_is_that_of_all() -> None:
    x = torch.zeros(64)
    assert aligned(x, None, x[4:])
    assert not aligned(x, x[1:])
    assert aligned()


def kernels_that_begin() -> list[Any]:
    """All of the package's kernels that may be launched before the one before has ended."""
    found = {}
    for place in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{place.name}")
        for x in vars(module).values():
            if "BEGIN" in getattr(x, "arg_names", ()):
                found[x.__name__] = x
    return list(found.values())


POINTERS = {
    *("q", "out", "k_cache", "v_cache", "k_scales", "v_scales", "block_table", "seq_lens", "query_start"),
    *("sinks", "slopes", "partial", "counters", "k", "v", "slot_mapping"),
}
"""Of kernels whose pointers are not called so."""


@pytest.mark.parametrize("kernel", kernels_that_begin(), ids=lambda kernel: kernel.__name__)
def test_kernels_begin_with_what_begins_them(kernel: Any) -> None:
    assert kernel.arg_names[-1] == "BEGIN"
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body
    assert isinstance(function, ast.FunctionDef)
    begin = [ast.unparse(statement) for statement in function.body].index("if BEGIN is not None:\n    BEGIN()")
    before = function.body[1 if ast.get_docstring(function) else 0 : begin]
    read_first = READ_FIRST.get(function.name)
    assert (read_first is None) == (not before)
    named = {x.id for statement in before for x in ast.walk(statement) if isinstance(x, ast.Name)}
    pointers = set(kernel.arg_names).intersection(POINTERS) | {x for x in kernel.arg_names if x.endswith("_ptr")}
    assert named.intersection(pointers) <= (read_first or set()) | {"k_cache_ptr"}  # None, where nothing is stored
    assert not {"store", "atomic_add"}.intersection(
        x.attr for statement in before for x in ast.walk(statement) if isinstance(x, ast.Attribute)
    )


def test_launchers_launch_kernels_that_begin() -> None:
    for module in MODULES:
        for launcher in launchers_of(module):
            assert launcher._kernel.arg_names[-1] == "BEGIN"
