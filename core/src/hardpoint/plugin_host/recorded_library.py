"""A vendor's library as a plugin calls it: which arguments it is given, and why it cannot be called so.

Arguments are passed to libraries by name. A plugin records which, from the library's public sources, and refuses a
library that takes others.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint_plugin_api import Reason


@dataclass(frozen=True)
class RecordedLibrary:
    """A library called ``title``. ``signatures``: ``module:path.of.function`` -> the arguments that are passed; all
    others must have defaults. ``fix`` says how to get the right one; reasons have codes that begin with ``code``.
    """

    title: str
    code: str
    fix: str
    signatures: Mapping[str, Sequence[str]]

    def find(self, name: str) -> Any:
        """The object at ``module:path`` in the library. Raises AttributeError, and whatever its import raises."""
        module, _, path = name.partition(":")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        return found

    def reasons(self) -> list[Reason]:
        """Why the library cannot be called as recorded: each function that is missing or takes other arguments."""
        found = []
        for name, keywords in self.signatures.items():
            try:
                takes = _other_parameters(self.find(name), keywords)
            except AttributeError as error:
                found.append(Reason(f"{self.code}-function", f"this {self.title} lacks {name}: {error}", fix=self.fix))
            except Exception as error:  # it loads compiled code
                return [Reason(f"{self.code}-import", f"{self.title} cannot be imported: {error}", fix=self.fix)]
            else:
                if takes is not None:
                    message, wanted = f"{name} of this {self.title} takes other arguments", ", ".join(keywords)
                    found.append(Reason(f"{self.code}-signature", message, wanted, takes, self.fix))
        return found


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _other_parameters(function: Any, keywords: Sequence[str]) -> str | None:
    """The parameters of a function that cannot be called with these keywords alone; None where it can."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind not in _ANY]
    known, needed = {p.name for p in parameters}, {p.name for p in parameters if p.default is p.empty}
    if set(keywords) <= known and needed <= set(keywords):
        return None
    return ", ".join(p.name for p in parameters)
