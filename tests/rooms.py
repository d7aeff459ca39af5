"""The rooms of core (its packages, and the modules beside them) and the imports between them.

``python tests/rooms.py`` draws them as a Mermaid graph, lowest room first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

CORE = Path(__file__).parents[1] / "core" / "src" / "hardpoint"

ORDER = (
    (
        "logs",
        "dtypes",
        "profiling",
        "extras",
        "startup_times",
        "thread_waiting",
        "garbage_collection",
        "fork_server",
        "bytecode",
    ),
    ("plugin_host", "numerics"),
    ("adapters", "metrics", "parallel"),
    ("selection", "config"),
    ("ops", "checkpoint", "cache_users", "resources", "kernel_results"),
    ("kernel_calls", "quantization"),
    ("context",),
    ("attention", "experts", "drafters"),
    ("layers", "structured", "kernels", "reference"),
    ("compilation",),
    ("models", "parsers", "tokenizer", "platforms", "authoring"),
    ("conformance",),
    ("engine",),
    ("server", "terminal"),
    ("bench",),
    ("cli", "plugin"),
)
"""The rooms by floor, lowest first. A room imports rooms of lower floors alone."""

Arrows = dict[tuple[str, str], set[str]]
"""Modules that import, by (their room, the room that they import)."""


def floors() -> dict[str, int]:
    """Room -> the number of its floor."""
    return {room: number for number, rooms in enumerate(ORDER) for room in rooms}


def arrows(folder: Path = CORE) -> Arrows:
    """The imports between rooms of the package in ``folder``, those for type checkers left out."""
    found: Arrows = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts == ("__init__",):
            continue  # the front door, which imports on first use
        for target in _imports(ast.parse(path.read_text()), folder):
            if target != parts[0]:
                found.setdefault((parts[0], target), set()).add(".".join(parts))
    return found


def upward(found: Arrows, floor: dict[str, int]) -> list[str]:
    """A line for each import of a room that is not below the importing one."""
    return [
        f"{room} imports {target} of the same floor or above, in {', '.join(sorted(modules))}"
        for (room, target), modules in sorted(found.items())
        if floor[target] >= floor[room]
    ]


def _imports(tree: ast.AST, folder: Path) -> Iterator[str]:
    """The rooms that a module imports, at its top or within functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module == folder.name:
            yield from (alias.name for alias in node.names if (folder / alias.name).is_dir() or _module(folder, alias))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{folder.name}."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith(f"{folder.name}."))
        else:
            yield from _imports(node, folder)


def _module(folder: Path, alias: ast.alias) -> bool:
    return (folder / f"{alias.name}.py").is_file()


def drawing(found: Arrows) -> str:
    """The rooms as a Mermaid graph, a subgraph for each floor."""
    lines = ["graph BT"]
    for number, rooms in enumerate(ORDER):
        lines += [f"  subgraph floor{number}", *(f"    {room}" for room in rooms), "  end"]
    return "\n".join([*lines, *(f"  {room} --> {target}" for room, target in sorted(found))])


if __name__ == "__main__":
    print(drawing(arrows()))
