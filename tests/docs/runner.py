"""Runs a page of the documentation as its reader would: block by block, in a folder and an environment of its own.

The words behind a block's three backticks say how it is run:

* ``bash``: commands, each of which must succeed. The folder that they end in is where the next block begins.
* ``console``: commands behind ``$``, and under each what it prints; ``...`` stands for anything. They succeed, or, with
  ``fails="yes"``, fail.
* ``python``: a script, which must succeed.
* any language and ``title="PATH"``: the reader writes this file.
* any language and ``shows="PATH"``: lines of a file that is there already.
* ``toml`` alone: must be TOML. ``text``: nothing is done with it.
"""

from __future__ import annotations

import doctest
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.support.environment import Environment

_INFO = re.compile(r"(?P<info>[^\n]*)\n")
_LANGUAGES = {"bash", "console", "python", "text", "toml"}
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Reader:
    """Follows one page. ``folder`` is where the reader is at the moment."""

    environment: Environment
    folder: Path

    def follow(self, page: Path) -> int:
        """Do what the page says; returns the number of blocks that were run. Raises AssertionError at the first lie."""
        examples = list(Sybil(parsers=[self._blocks], path=str(page.parent)).parse(page).examples())
        for example in examples:
            example.evaluate()
        return len(examples)

    def _blocks(self, document: Document) -> Iterator[Region]:
        for region in RawFencedCodeBlockLexer(_INFO)(document):
            language, _, rest = str(region.lexemes["info"]).strip().partition(" ")
            options = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            assert language in _LANGUAGES or options, f"{document.path}: no rule for blocks of {language!r}"
            if language != "text":
                region.parsed = (language, options, str(region.lexemes["source"]))
                region.evaluator = self._evaluate
                yield region

    def _evaluate(self, example: Example) -> None:
        language, options, source = example.parsed
        where = f"{Path(example.path).name}, line {example.line}"
        if "title" in options:
            path = self.folder / options["title"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        elif "shows" in options:
            text = (self.folder / options["shows"]).read_text(encoding="utf-8")
            assert source in text, f"{where}: {options['shows']} does not hold these lines; it is\n{text}"
        elif language == "toml":
            tomllib.loads(source)
        elif language == "python":
            (self.folder / "block.py").write_text(source, encoding="utf-8")
            self._succeed("python block.py\nrm block.py", where)
        elif language == "bash":
            self._succeed(source, where)
        else:
            self._converse(source, where, fails="fails" in options)

    def _succeed(self, command: str, where: str) -> str:
        place = self.environment.folder / "place"
        done = self.environment.run(f"{command}\npwd > {place}", self.folder)
        assert done.returncode == 0, f"{where}: {command!r} failed:\n{done.stdout}"
        self.folder = Path(place.read_text(encoding="utf-8").strip())
        return done.stdout

    def _converse(self, source: str, where: str, fails: bool) -> None:
        for turn in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]:
            command, _, expected = turn.partition("\n")
            done = self.environment.run(command, self.folder)
            got = done.stdout
            assert (done.returncode != 0) == fails, f"{where}: {command!r} exits with {done.returncode}:\n{got}"
            answered = doctest.OutputChecker().check_output(expected, got, _OPTIONS)
            assert answered, f"{where}: {command!r} should print\n{expected}\nand printed\n{got}"
