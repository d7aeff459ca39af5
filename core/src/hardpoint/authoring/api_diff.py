"""Changes of the plugin API between two versions, and whether they break a plugin that was written for the first.

Additions break nobody, with two exceptions: what a plugin must implement from now on, and parameters that it is given
and does not know. Everything else that is not the same breaks somebody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hardpoint.authoring.api_surface import Entry, Surface

_MINE_TO_IMPLEMENT = {"interface"}
_SIZES = {"options", "families", "members"}
"""Keys whose value is a collection that may grow."""
_FREE = {"stability", "flag"}
"""Keys that say nothing a plugin relies on."""


@dataclass(frozen=True)
class Change:
    """One entry that is not as it was. ``breaks`` says why a plugin may stop working; empty: none does."""

    kind: Literal["added", "changed", "removed"]
    path: str
    was: str
    now: str
    breaks: str = ""


def compare(old: Surface, new: Surface) -> list[Change]:
    """Every change from ``old`` to ``new``, by path."""
    changes = []
    for path in sorted(old.entries.keys() | new.entries.keys()):
        was, now = old.entries.get(path), new.entries.get(path)
        if was is None and now is not None:
            changes.append(Change("added", path, "", text_of(now), _burden(path, now, old)))
        elif was is not None and now is None:
            changes.append(Change("removed", path, text_of(was), "", "it is gone"))
        elif was is not None and now is not None and was != now:
            implemented = old.entries.get(path.rpartition(".")[0], {}).get("kind") in _MINE_TO_IMPLEMENT
            reasons = "; ".join(_breaks(was, now, implemented))
            changes.append(Change("changed", path, text_of(was), text_of(now), reasons))
    return changes


def text_of(entry: Entry) -> str:
    """An entry on one line, as one writes it in Python where that can be."""
    kind = "abstract method" if entry.get("abstract") else entry["kind"]
    if "params" in entry:
        text = f"{kind} {signature_of({**entry, 'returns': ''} if kind == 'dataclass' else entry)}"
    elif "type" in entry:
        text = f"{kind} {entry['type']}"
    else:
        text = kind
    rest = {k: v for k, v in entry.items() if k not in ("kind", "abstract", "params", "returns", "type") and v}
    return " ".join([text, *(f"{key}={_plain(value)}" for key, value in rest.items())])


def signature_of(entry: Entry) -> str:
    """``(a: int, *, b: str) -> int``."""
    return f"({', '.join(entry['params'])})" + (f" -> {entry['returns']}" if entry.get("returns") else "")


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(map(str, value))
    return ",".join(map(_plain, value)) if isinstance(value, list) else str(value)


def _burden(path: str, entry: Entry, old: Surface) -> str:
    """Why an addition breaks plugins."""
    if entry.get("abstract") and path.rpartition(".")[0] in old.entries:
        return "a plugin's class does not have it"
    return ""


def _breaks(was: Entry, now: Entry, implemented: bool) -> Iterator[str]:
    """Why an entry that is not as it was breaks plugins."""
    exact = implemented or was["kind"] in ("op", "layer")
    for key in sorted((was.keys() | now.keys()) - _FREE):
        a, b = was.get(key), now.get(key)
        if a == b or (key == "bases" and set(a or ()) <= set(b or ())) or (key == "abstract" and not b):
            continue
        if key == "params" and isinstance(a, list) and isinstance(b, list):
            if was["kind"] == "hook":  # an implementation may take fewer arguments than the hook offers
                if not set(a) <= set(b):
                    yield "an argument is gone, or another"
            elif exact:
                yield "a plugin's implementation takes other arguments"
            elif not _accepts(a, b):
                yield "a call that was right is not"
        elif key in _SIZES and a is not None and b is not None:
            if _missing(a, b):
                yield f"of its {key} some are gone, or others"
        else:
            yield f"its {key} is another"


def _accepts(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether every call that fits the parameters ``old`` fits ``new``."""
    positional, keyword = _split(old)
    now_positional, now_keyword = _split(new)
    stay = len(now_positional) >= len(positional) and all(map(_same, positional, now_positional))
    still_there = all(any(_same(p, q) for q in (*now_keyword, *now_positional)) for p in keyword)
    rest = [q for q in (*now_positional[len(positional) :], *now_keyword) if not any(_same(p, q) for p in keyword)]
    return stay and still_there and all(" = " in q or q.startswith("*") for q in rest)


def _split(params: Sequence[str]) -> tuple[list[str], list[str]]:
    """The parameters before and behind the ``*``."""
    at = params.index("*") if "*" in params else len(params)
    return list(params[:at]), list(params[at + 1 :])


def _same(old: str, new: str) -> bool:
    """Equal, or with a default that it did not have."""
    return new == old or new.startswith(f"{old} = ")


def _missing(old: Any, new: Any) -> bool:
    if isinstance(old, Mapping):
        return any(name not in new or new[name] != value for name, value in old.items())
    return not set(old) <= set(new)
