"""Compiled pieces that run without Inductor: a function that allocates, and kernels in shared objects.

Inductor writes a piece as a Python module. To load it, Inductor imports itself, tries out what the C++ compiler can do,
and looks for its kernels by hashes of their source and of the compiler's flags, which takes seconds. Most pieces for a
CPU need nothing of this: ``keep`` stores the module's function ``call`` and its shared objects, and ``load`` brings
them back. A piece that needs more of Inductor, such as its kernels in Triton, is none of these.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hardpoint.compilation.program import PieceFunction

_CODE, _KERNELS = "call.py", "KERNELS"
_MODULES = ("torch", "math", "cmath")
"""Modules that a kept function may import."""

_DATA_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""A variable of the process, in which kernels look for torch's function from a tensor to its address."""


def keep(made: Path, folder: Path, num_inputs: int, num_outputs: int) -> bool:
    """Write to ``folder`` what the piece in ``made``, a cache folder of Inductor, needs to run.

    False, and nothing is written, where that is more than one function of so many inputs and outputs, torch, and
    kernels in C++.
    """
    modules = [path for path in made.glob("??/*.py") if "async_compile" in path.read_text()]
    if len(modules) != 1:
        return False
    module = _Module.of(ast.parse(modules[0].read_text()))
    function = _function(module.call, num_inputs, num_outputs)
    if function is None:
        return False
    needed = _free_names(function) - set(dir(builtins))
    kernels = {name: _shared_object(made, module.kernels[name]) for name in sorted(needed & module.kernels.keys())}
    others = sorted(needed - kernels.keys())
    if None in kernels.values() or not module.definitions.keys() >= set(others):
        return False
    folder.mkdir()
    names = {}
    for number, (name, path) in enumerate(kernels.items()):
        assert path is not None
        names[name] = f"kernel{number}.so"
        shutil.copyfile(path, folder / names[name])
    lines = ["import torch", *(module.definitions[name] for name in others), f"{_KERNELS} = {names!r}"]
    (folder / _CODE).write_text("\n".join([*lines, ast.unparse(function), ""]))
    return True


def load(folder: Path) -> PieceFunction:
    """The piece that ``keep`` wrote to ``folder``. Runs code from there."""
    os.environ[_DATA_POINTER] = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]  # of C++
    path = folder / _CODE
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    for name, file in names[_KERNELS].items():
        names[name] = _kernel(folder / file)
    function: PieceFunction = names["call"]
    return function


def _kernel(path: Path) -> Callable[..., None]:
    """The function of an extension module that Inductor's bindings for Python made, whose name is always ``kernel``."""
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., None] = module.kernel
    return function


@dataclass
class _Module:
    """The parts of a module that Inductor wrote. ``definitions``: statements that import or name a part of torch, by
    the name that each binds; ``kernels``: C++ by name."""

    call: ast.FunctionDef | None = None
    definitions: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> _Module:
        found = cls()
        functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == "call"]
        found.call = functions[0] if len(functions) == 1 else None
        for statement in tree.body:
            match statement:
                case ast.Import(names=names):
                    found._define(names, (f"import {each.name}" for each in names), {each.name for each in names})
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    found._define(names, (f"from {module} import {each.name}" for each in names), {module})
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value) if _is_of_torch(value):
                    found.definitions[name] = ast.unparse(statement)
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[_, ast.Constant(value=str(source))]),
                ):
                    found.kernels[name] = source
        return found

    def _define(self, names: list[ast.alias], statements: Iterator[str], modules: set[str]) -> None:
        if modules <= set(_MODULES):
            self.definitions |= {
                each.name: text for each, text in zip(names, statements, strict=True) if not each.asname
            }


def _is_of_torch(value: ast.expr) -> bool:
    """Whether ``value`` is an attribute of torch that is there without Inductor."""
    text = ast.unparse(value)
    return text.startswith(("torch.ops.", "torch._C.")) and text.replace(".", "").replace("_", "").isalnum()


def _function(call: ast.FunctionDef | None, num_inputs: int, num_outputs: int) -> ast.FunctionDef | None:
    """``call(args)``, which takes a list apart that it clears, as a function of its inputs."""
    match call:
        case ast.FunctionDef(
            args=ast.arguments(args=[*_, ast.arg(arg=given)]),
            body=[
                ast.Assign(targets=[ast.Tuple(elts=inputs)], value=ast.Name(id=taken)),
                ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=cleared), attr="clear"))),
                *steps,
                ast.Return(value=ast.Tuple(elts=outputs)),
            ],
        ) if given == taken == cleared and (len(inputs), len(outputs)) == (num_inputs, num_outputs):
            parameters = [ast.arg(arg=each.id) for each in inputs if isinstance(each, ast.Name)]
            body = [*steps, call.body[-1]]
            arguments = ast.arguments(posonlyargs=parameters, args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            function = ast.FunctionDef(name="call", args=arguments, body=body, decorator_list=[])
            is_alone = not any(isinstance(node, ast.Return) for step in steps for node in ast.walk(step))
            return ast.fix_missing_locations(function) if is_alone and len(parameters) == num_inputs else None
    return None


def _free_names(function: ast.FunctionDef) -> set[str]:
    """The names that ``function`` reads and does not bind; a part of Inductor by its module's name."""
    bound = {each.arg for each in function.args.posonlyargs}
    read: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            (bound if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in ("_inductor", "_dynamo"):
            read.add(node.attr)
    return read - bound


def _shared_object(made: Path, source: str) -> Path | None:
    """The file that was compiled from C++ which holds ``source``."""
    for path in sorted(made.glob("??/*.cpp")):
        if source.strip() in path.read_text() and path.with_suffix(".so").exists():
            return path.with_suffix(".so")
    return None
