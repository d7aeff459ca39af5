"""The exception tree, drawn once.

    HardpointError
    ├── ConfigError (ValueError)       a flag, key or value that the user gave
    │   └── UnknownNameError           a name that nothing answers to; carries the nearest one
    ├── PluginError                    something about an installed plugin
    │   ├── ManifestError              hardpoint.toml is malformed, or newer than this host
    │   ├── PluginConflictError        two plugins claim one thing; both are named
    │   └── PluginLoadError            import, hook or target failed; carries the cause
    ├── SelectionError                 nothing (or not the thing asked for) can serve; carries every reason
    ├── PlatformError                  no usable platform, or several and no flag
    ├── CheckpointError                files of a model: missing, truncated, wrong shape, unknown architecture
    ├── RequestError (ValueError)      one request: prompt too long, bad sampling parameters
    ├── CapacityError                  memory: a cache too small for one sequence, a pool that does not fit
    └── EngineError                    a running engine failed a request that was valid; others may go on
        └── EngineDeadError            the engine itself is gone: no request will be served any more

Each message names the input, says why it is refused, and what to do instead. They are for users; a broken invariant
inside Hardpoint is an ``assert``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint_plugin_api.reasons import Reason


_MOST_NEAREST = 3
"""Names that an error offers where it does not list all."""


class HardpointError(Exception):
    """Base of every error that Hardpoint raises on purpose. Pickles, whatever a subclass's constructor takes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild without the constructor: engines in processes of their own send their errors home."""
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigError(HardpointError, ValueError):
    """A flag, config key or value is invalid."""


class UnknownNameError(ConfigError):
    """A name that nothing answers to.

    ``kind`` says what was looked for ("attention backend"), ``known`` the valid names. The message has them all, unless
    ``listed_by`` names the place that lists them, such as a command: then it has the nearest names and that place.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "", *, listed_by: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        found = _nearest(name, self.known, _MOST_NEAREST if listed_by else 1)
        self.nearest = found[0] if found else None
        if listed_by:
            names = f"{'All' if found else 'all'} names: {listed_by}"
        else:
            names = f"{'Known' if found else 'known'}: {', '.join(self.known) or 'none'}"
        asked = f"; did you mean {' or '.join(map(repr, found))}? " if found else "; "
        super().__init__(f"unknown {kind} {name!r}{asked}{names}." + (f" {hint}" if hint else ""))


class PluginError(HardpointError):
    """Something is wrong with an installed plugin."""


class ManifestError(PluginError):
    """A ``hardpoint.toml`` cannot be accepted; the message names the file and the key."""


class PluginConflictError(PluginError):
    """Two plugins claim the same name or replace the same contribution; the message names both."""


class PluginLoadError(PluginError):
    """A plugin's module, hook or target could not be loaded; ``__cause__`` holds the original error."""


class SelectionError(HardpointError):
    """No candidate can serve a request, or not the one that was asked for by name.

    ``rejected`` maps each candidate's name to the reasons against it.
    """

    def __init__(self, message: str, rejected: dict[str, Sequence[Reason]] | None = None) -> None:
        self.rejected = dict(rejected or {})
        lines = [message]
        for name, reasons in self.rejected.items():
            lines += [f"  {name}: {reason}" for reason in reasons]
        super().__init__("\n".join(lines))


class PlatformError(HardpointError):
    """No platform can be used, or several could and none was asked for."""


class CheckpointError(HardpointError):
    """A model's files are missing, damaged, or not of a supported kind."""


class RequestError(HardpointError, ValueError):
    """One request is invalid; the engine and its other requests go on."""


class CapacityError(HardpointError):
    """Memory does not suffice for what was asked."""


class EngineError(HardpointError):
    """The engine failed while it served a request; the request was valid, and the engine may go on with others."""


class EngineDeadError(EngineError):
    """The engine has ended and serves no request any more. Open requests and later calls raise this error.

    Build a new engine. A core that is restarted keeps its open requests instead.
    """


def _rebuild(kind: type[HardpointError], args: tuple[Any, ...], state: dict[str, Any]) -> HardpointError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the valid name most like ``name``, or None where nothing is close."""
    return next(iter(_nearest(name, known, 1)), None)


def _nearest(name: str, known: Iterable[str], most: int) -> list[str]:
    """The valid names most like ``name``, the nearest first, at most ``most``."""
    folded = {k.casefold().replace("-", "_"): k for k in known}
    hits = difflib.get_close_matches(name.casefold().replace("-", "_"), list(folded), n=most, cutoff=0.6)
    return [folded[hit] for hit in hits]
