"""Print the tests that cover a source file: ``make which-test FILE=core/src/hardpoint/engine/core.py``.

A test covers a file that it imports, by itself or by way of other files. The tests at the shortest distance are
printed, one path a line: pass them to pytest. A file that nothing imports (a kernel in C++, the target of a manifest, a
command) is covered by the tests that have its name as a word.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("plugin_api/src", "core/src", *(f"plugins/{name}/src" for name in ("cpu", "cuda", "rocm", "xpu")))
"""Folders on the import path."""


@dataclass
class ImportGraph:
    """The imports among the Python files of sources and tests.

    ``files`` has the file of each module, ``importers`` the files that import each file; imports within functions and
    those for type checkers count, too. A name that a package imports for others counts as its own module.
    """

    files: dict[str, Path] = field(default_factory=dict)
    importers: dict[Path, set[Path]] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> ImportGraph:
        """Parse every file below ``root``'s source folders and ``tests``."""
        graph = cls()
        for folder in SOURCES:
            for path in sorted((root / folder).rglob("*.py")):
                graph.files[_module(path.relative_to(root / folder))] = path
        tests = sorted((root / "tests").rglob("*.py"))
        graph.files |= {_module(path.relative_to(root)): path for path in tests}
        for path in list(graph.files.values()):
            for found in graph._imports(path):
                graph.importers.setdefault(found, set()).add(path)
        return graph

    def covering(self, path: Path) -> tuple[Path, ...]:
        """The test files at the shortest distance from ``path``, sorted; none where no test reaches it."""
        seen, edge = {path}, {path}
        while edge:
            edge = {importer for each in edge for importer in self.importers.get(each, ())} - seen
            if found := sorted(each for each in edge if each.name.startswith("test_")):
                return tuple(found)
            seen |= edge
        return ()

    def _imports(self, path: Path) -> Iterator[Path]:
        for node in _imports_of(path):
            if isinstance(node, ast.Import):
                yield from (self.files[alias.name] for alias in node.names if alias.name in self.files)
            elif node.module and not node.level:
                for alias in node.names:
                    if found := self._home(node.module, alias.name):
                        yield found

    def _home(self, module: str, name: str) -> Path | None:
        """The file of ``name`` of ``module``: a module of that name, or where the package took it from."""
        if inner := self.files.get(f"{module}.{name}"):
            return inner
        path = self.files.get(module)
        if path is None or path.name != "__init__.py":
            return path
        source = _taken(path).get(name)
        if source is None or source == module:
            return path
        return self._home(source, name) or path


def naming(path: Path, root: Path) -> tuple[Path, ...]:
    """The test files whose text has the name of ``path``, without its suffix, as a word."""
    word = re.compile(rf"\b{re.escape(path.stem)}\b")
    return tuple(test for test in sorted((root / "tests").rglob("test_*.py")) if word.search(test.read_text()))


@cache
def _taken(path: Path) -> dict[str, str]:
    """The names that a package's ``__init__.py`` imports, with the module of each."""
    froms = [node for node in _imports_of(path) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module for node in froms if node.module for alias in node.names}


def _imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file. Its tree is not kept: the garbage collector takes seconds for all of them."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main(arguments: list[str]) -> int:
    """Print the tests of each file in ``arguments``. Returns the exit code: 1 where one has none."""
    if not arguments:
        print("which_test: name a file, as in: make which-test FILE=core/src/hardpoint/engine/core.py", file=sys.stderr)
        return 2
    if missing := [argument for argument in arguments if not Path(argument).is_file()]:
        print(f"which_test: there is no file {', '.join(missing)}", file=sys.stderr)
        return 2
    graph, code = ImportGraph.read(ROOT), 0
    for argument in arguments:
        path = Path(argument).resolve()
        found = graph.covering(path) or naming(path, ROOT)
        for test in found:
            print(test.relative_to(ROOT))
        if not found:
            print(f"which_test: no test imports or names {argument}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
