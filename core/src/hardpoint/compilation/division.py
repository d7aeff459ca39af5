"""A traced pass cut at its calls of layers: pieces of torch operators, and the order in which all of it runs.

A value that crosses a cut is never a view: a view is taken again where it is read, which costs no kernel. Numbers that
depend on the number of tokens T become ``a * T + b``. A piece gets T itself where it needs one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from hardpoint.compilation.program import Call, Piece, Program, Reference, View
from hardpoint.compilation.tracing import Traced
from hardpoint.ops.tracing import CannotCompileError

_LAYER = torch.ops.hardpoint.layer.default
_VIEWS_IN_ALL_BUT_NAME = frozenset({torch.ops.aten._unsafe_view.default})
_SIZES = (2, 3, 5, 16, 61, 1000, 8191)
"""Numbers of tokens at which the conditions that tracing noted are evaluated."""


@dataclass
class PieceGraph:
    """A piece before it is compiled. ``examples``: its inputs, without values. ``key``: a hash of all it computes."""

    graph: GraphModule
    examples: list[Any]
    key: str

    @property
    def num_outputs(self) -> int:
        """How many tensors it returns."""
        output = next(node for node in self.graph.graph.nodes if node.op == "output")
        return len(output.args[0])


@dataclass(frozen=True)
class Divided:
    """``pieces`` are by key: equal ones stand there once. ``constants`` are the program's tensors, by slot."""

    program: Program
    pieces: dict[str, PieceGraph]
    constants: dict[int, torch.Tensor]


def divide(traced: Traced) -> Divided:
    """Cut ``traced`` at its layers. Raises CannotCompileError for operators that cannot be compiled apart."""
    return _Division(traced).divide()


@dataclass
class _Division:
    traced: Traced
    slots: dict[Node, int] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    pieces: dict[str, PieceGraph] = field(default_factory=dict)
    program: Program = field(default_factory=Program)
    size: Any = None
    """The number of tokens: a SymInt."""

    def divide(self) -> Divided:
        graph = self.traced.graph.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._find_symbol(inputs[0])
        self.program.inputs = [self._slot(node) for node in inputs]
        run: list[Node] = []
        output = next(node for node in graph.nodes if node.op == "output")
        for node in graph.nodes:
            if node.op == "get_attr":
                self.constants[self._slot(node)] = _attribute(self.traced.graph, str(node.target))
            elif node.op == "call_function" and node.target is _LAYER:
                self._close(run, graph)
                run = []
                self._call(node)
            elif node.op == "call_function" and not self._is_free(node):
                _check(node)
                run.append(node)
        self._close(run, graph)
        result = output.args[0]
        result = result[0] if isinstance(result, tuple | list) else result
        self.program.result = self._read(result)
        self.program.num_slots = len(self.slots)
        self.program.forget_early()
        return Divided(self.program, self.pieces, self.constants)

    def _find_symbol(self, ids: Node) -> None:
        """The symbol of the number of tokens. Raises CannotCompileError where code takes a course for some numbers."""
        size = ids.meta["val"].shape[0]
        if isinstance(size, int):
            if size != 1:
                raise CannotCompileError("its code takes a course of its own for each number of tokens")
            return
        free = size.node.expr.free_symbols
        if len(free) != 1:
            raise CannotCompileError("its code takes a course of its own for each number of tokens")
        self.size, (symbol,) = size, free
        for guard in ids.meta["val"].fake_mode.shape_env.guards:
            for number in _SIZES:
                if guard.expr.subs(symbol, number) == False:  # noqa: E712  # sympy's False
                    raise CannotCompileError(f"its code takes another course for {number} tokens: {guard.expr}")

    def _is_free(self, node: Node) -> bool:
        """Whether ``node`` needs no kernel: a view, a size, or a part of a layer's results."""
        if node.target is operator.getitem:
            return self._is_free(_node(node.args[0])) or _node(node.args[0]).target is _LAYER
        return isinstance(node.meta.get("val"), torch.SymInt | int) or _is_view(node)

    def _slot(self, node: Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def _close(self, run: list[Node], graph: Graph) -> None:
        """Make a piece of the operators that stand between two calls of layers."""
        if not run:
            return
        inside = set(run)
        read_later = [node for node in run if any(self._leaves(user, inside) for user in node.users)]
        if not read_later:
            return
        builder = _PieceBuilder(inside, self.size, self._affine)
        made, read = builder.build(run, read_later)
        key = hashlib.sha256("\n".join(_described(made, builder.examples, self._affine)).encode()).hexdigest()[:32]
        self.pieces.setdefault(key, PieceGraph(made, builder.examples, key))
        references: list[Reference] = [["slot", self._slot(node)] for node in read]
        if builder.reads_size:
            references.insert(0, ["size", 1, 0])
        self.program.steps.append(Piece(key, references, [self._slot(node) for node in read_later]))

    def _leaves(self, user: Node, inside: set[Node]) -> bool:
        """Whether ``user``, or what reads it where it is a view, stands outside of the piece."""
        if user in inside:
            return False
        if user.op == "call_function" and user.target is not _LAYER and self._is_free(user):
            return any(self._leaves(each, inside) for each in user.users)
        return True

    def _call(self, node: Node) -> None:
        given, number = node.args
        call = self.traced.calls[cast(int, number)]
        read = [self._read(each) for each in given]  # type: ignore[union-attr]
        parts = {int(each.args[1]): each for each in node.users if each.target is operator.getitem}  # type: ignore[arg-type]
        made = [self._slot(parts[i]) if i in parts else None for i in range(len(node.meta["val"]))]
        self.program.steps.append(Call(call.address, call.arguments, read, call.results, made))

    def _read(self, value: object) -> Reference:
        """How a step reads ``value`` of the graph; a view is taken first."""
        if not isinstance(value, Node):
            return ["value", _plain(value)]
        if isinstance(value.meta.get("val"), torch.SymInt | int):
            return ["size", *self._affine(value.meta["val"])]
        is_view = value.op == "call_function" and self._is_free(value)
        is_part = value.target is operator.getitem and _node(value.args[0]).target is _LAYER
        if is_view and not is_part and value not in self.slots:
            if value.kwargs:
                raise CannotCompileError(f"a view has keyword arguments: {value.target}")
            arguments: list[Reference] = [self._nested(each) for each in value.args]
            self.program.steps.append(View(_name(value.target), arguments, self._slot(value)))
        return ["slot", self._slot(value)]

    def _nested(self, value: object) -> Reference:
        if isinstance(value, tuple | list):
            return ["list", [self._nested(each) for each in value]]
        return self._read(value)

    def _affine(self, size: Any) -> tuple[int, int]:
        """(a, b), so that ``size`` is ``a * T + b``. Raises CannotCompileError for other numbers."""
        if isinstance(size, int):
            return 0, size
        expression, (symbol,) = size.node.expr, self.size.node.expr.free_symbols
        at = [int(expression.subs(symbol, number)) for number in (6, 7, 64, 1001)]
        a, b = at[1] - at[0], at[0] - 6 * (at[1] - at[0])
        if at[2:] != [64 * a + b, 1001 * a + b]:
            raise CannotCompileError(f"its code makes {expression} of the number of tokens")
        return a, b


@dataclass
class _PieceBuilder:
    """Copies a run of operators into a graph of their own. ``examples``: its inputs without values, in order."""

    inside: set[Node]
    size: Any
    affine: Callable[[Any], tuple[int, int]]
    graph: Graph = field(default_factory=Graph)
    examples: list[Any] = field(default_factory=list)
    _copies: dict[Node, Node] = field(default_factory=dict)
    _sizes: dict[tuple[int, int], Any] = field(default_factory=dict)
    _size: Node | None = None

    @property
    def reads_size(self) -> bool:
        """Whether its first input is the number of tokens."""
        return self._size is not None

    def build(self, run: list[Node], outputs: list[Node]) -> tuple[GraphModule, list[Node]]:
        """The module, and the values that it reads, in order."""
        bases, sizes = self._found(run)
        if any(self.affine(size)[0] for size in sizes):
            self._size = self.graph.placeholder("size")
            self.examples.append(self.size)
        for number, base in enumerate(bases):
            self._copies[base] = self.graph.placeholder(f"x{number}")
            self._copies[base].meta["val"] = base.meta["val"]
            self.examples.append(base.meta["val"])
        for node in run:
            self._copy(node)
        self.graph.output(tuple(self._copies[node] for node in outputs))
        self.graph.lint()
        return GraphModule({}, self.graph), bases

    def _found(self, run: Iterable[Node]) -> tuple[list[Node], list[Any]]:
        """Values from outside that the run reads, and the numbers that depend on T."""
        bases: dict[Node, None] = {}
        sizes: list[Any] = []
        seen: set[Node] = set()

        def look(node: Node) -> None:
            if node in seen:
                return
            seen.add(node)
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt | int):
                sizes.append(value)
            elif node in self.inside or _is_view_or_part(node):
                for each in node.all_input_nodes:
                    look(each)
            else:
                bases[node] = None

        for node in run:
            look(node)
        return list(bases), sizes

    def _copy(self, node: Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int):
            return self._number(*self.affine(value))
        if node not in self._copies:
            for each in node.all_input_nodes:
                self._copy(each)
            self._copies[node] = self.graph.node_copy(node, self._copy)
        return self._copies[node]

    def _number(self, a: int, b: int) -> Any:
        if not a:
            return b
        if (a, b) not in self._sizes:
            made: Any = self._size
            made = made if a == 1 else self.graph.call_function(operator.mul, (made, a))
            self._sizes[a, b] = made if not b else self.graph.call_function(operator.add, (made, b))
        return self._sizes[a, b]


def _described(module: GraphModule, examples: list[Any], affine: Callable[[Any], tuple[int, int]]) -> Iterator[str]:
    """Lines that say all of what a piece computes, without names that depend on where it stands."""
    names = {node: f"v{number}" for number, node in enumerate(module.graph.nodes)}
    for example in examples:
        if isinstance(example, torch.Tensor):
            form = [[affine(size) for size in sizes] for sizes in (example.shape, example.stride())]
            yield f"{example.dtype} {example.device} {form}"
        else:
            yield "tokens"
    for node in module.graph.nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: names[each])
        yield f"{names[node]} {node.op} {_name(node.target) if callable(node.target) else ''} {arguments}"


def _is_view(node: Node) -> bool:
    target = node.target
    is_operator = isinstance(target, torch._ops.OpOverload)
    return is_operator and (target.is_view or target in _VIEWS_IN_ALL_BUT_NAME)  # type: ignore[union-attr]


def _is_view_or_part(node: Node) -> bool:
    if node.target is operator.getitem:
        return _node(node.args[0]).target is not _LAYER and _is_view_or_part(_node(node.args[0]))
    return node.op == "call_function" and _is_view(node)


def _check(node: Node) -> None:
    """Raise CannotCompileError for operators whose results depend on values, or that write to tensors."""
    target = node.target
    if target is operator.getitem:
        return
    if not isinstance(target, torch._ops.OpOverload):
        raise CannotCompileError(f"its code calls {getattr(target, '__name__', target)}")
    if target._schema.is_mutable:
        raise CannotCompileError(f"its code writes to a tensor in place ({target})")
    by_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(target.tags)
    if by_values and not _indexes_by_numbers(node):
        raise CannotCompileError(f"its code asks for a tensor's values ({target})")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise CannotCompileError(f"its code draws random numbers ({target})")


def _indexes_by_numbers(node: Node) -> bool:
    """Whether an operator takes elements at numbers: the shape of its result follows from theirs."""
    if node.target not in (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor):
        return False
    masks = (torch.bool, torch.uint8)
    return not any(isinstance(each, Node) and each.meta["val"].dtype in masks for each in cast(list[Any], node.args[1]))


def _attribute(module: GraphModule, name: str) -> torch.Tensor:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, torch.Tensor)
    return found.detach()


def _node(value: object) -> Node:
    assert isinstance(value, Node)
    return value


def _name(target: object) -> str:
    return "getitem" if target is operator.getitem else getattr(target, "__name__", "") and str(target)


def _plain(value: object) -> Any:
    """An argument of a view as JSON has it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CannotCompileError(f"a view is taken with {value!r}")
