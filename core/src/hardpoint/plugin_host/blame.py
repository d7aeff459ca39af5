"""Whose fault it is: what a plugin's code does wrong is an error that names the plugin."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from hardpoint.plugin_host.loading import describe
from hardpoint.plugin_host.record import Offer
from hardpoint_plugin_api import HardpointError, PluginLoadError

if TYPE_CHECKING:
    from hardpoint.plugin_host.culprits import Suspect
    from hardpoint.plugin_host.registry import PluginSet

T = TypeVar("T")
_RAISED_IN = "Raised in plugin"


@contextmanager
def blame(offer: Offer) -> Iterator[None]:
    """Turn what the plugin's code inside raises into ``misbehaved``; Hardpoint's own errors pass through unchanged.

    So does want of memory, which is the machine's; a note names the contribution. For construction only: nothing on
    the token path is worth the cost.
    """
    try:
        yield
    except HardpointError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            error.add_note(f"Raised in plugin {offer.plugin}: {offer.contribution}.")
            raise
        raise misbehaved(offer, f"raised {describe(error)}") from error


def misbehaved(offer: Offer, fact: str) -> PluginLoadError:
    """The error that says what the target of ``offer`` did: plugin, contribution, target and ``fact``."""
    contribution = offer.contribution
    return PluginLoadError(
        f"plugin {offer.plugin}: {contribution}: target {contribution.target!r} {fact}; "
        "fix: choose another implementation with --use, leave the plugin out with --plugins, or report this to its "
        "author"
    )


def name_culprit(error: BaseException, plugins: PluginSet, serving: Iterable[Suspect] = ()) -> None:
    """Note on ``error`` from which plugin's code it came, if from any but core's, and which of ``serving`` that is.

    An error that bears such a note already gets no other.
    """
    if any(note.startswith(_RAISED_IN) for note in getattr(error, "__notes__", ())):
        return
    frames = list(reversed(list(traceback.walk_tb(error.__traceback__))))
    for frame, line in frames:
        filename = frame.f_code.co_filename
        for record in plugins.records:
            if record.folder and not record.is_core and Path(filename).is_relative_to(record.folder):
                where = Path(filename).relative_to(record.folder.parent)
                suspect = _innermost(serving, [(f.f_code.co_filename, number) for f, number in frames])
                choice = f" It serves as {suspect.slot}={suspect.name}." if suspect else ""
                error.add_note(
                    f"{_RAISED_IN} {record.title}, {where}, line {line}.{choice} Choose another implementation "
                    "with --use, leave the plugin out with --plugins, or report this to its author."
                )
                if tensors := _tensors(frame.f_locals):
                    error.add_note(f"Tensors there: {tensors}")
                return


def _innermost(serving: Iterable[Suspect], lines: Iterable[tuple[str, int]]) -> Suspect | None:
    """Whose code the first of ``lines`` (file, line) is that is anybody's."""
    known = list(serving)
    owners = (
        suspect
        for file, line in lines
        for suspect in known
        if any(file == path and first <= line <= last for path, first, last in suspect.spans)
    )
    return next(owners, None)


def _tensors(values: Mapping[str, object]) -> str:
    """Names, data types and shapes of what looks like tensors."""
    found = [(name, getattr(value, "dtype", None), getattr(value, "shape", None)) for name, value in values.items()]
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')}{list(shape)}"
        for name, dtype, shape in found
        if dtype is not None and isinstance(shape, tuple)
    )


class BelongsToPlugin(Protocol):
    """A build context, as far as this module knows it."""

    def for_plugin(self, plugin: str) -> object:
        """The same context, as code of ``plugin`` gets it."""
        ...


def construct(
    offer: Offer, target: object, kind: Callable[..., T], ctx: BelongsToPlugin, *args: object, **options: object
) -> T:
    """Return ``target(ctx, *args, **options)``, with the context as the offer's plugin gets it.

    Raises PluginLoadError unless it is a class of ``kind`` and can be built, by way of the constructor of ``kind``.
    """
    make = cast(Callable[..., T], of_kind(offer, target, cast("type[T]", kind)))
    with blame(offer):
        made = make(ctx.for_plugin(offer.plugin), *args, **options)
    if not hasattr(made, "ctx"):
        raise misbehaved(offer, "has an __init__ that does not call super().__init__()")
    return made


def of_kind(offer: Offer, target: object, kind: type[T]) -> type[T]:
    """Return ``target``, the target of ``offer``. Raises PluginLoadError unless it is a class of ``kind``."""
    if not (isinstance(target, type) and issubclass(target, kind)):
        raise misbehaved(offer, f"is no {kind.__name__}")
    return target
