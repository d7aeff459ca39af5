"""Whether a target's methods can be called as their interface says: names, keywords, and which may be left out.

Checked when a target is loaded, so that a method which lost a parameter is one line that names it, and not a traceback
of whoever calls it first. Annotations are not looked at, and a method may take more than it must where that is
optional. Of classes, every method is held to each public class of the plugin API that it derives from; of ops and
replaced layers, which have a signature for each name, the target to the one that declares the op or layer. Compiled
code need not say what it takes; nothing is checked there. Needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

from hardpoint_plugin_api.contributions import Form

DECLARING: Mapping[str, str] = {"op": "reference", "layer": "default"}
"""The name of the contribution that declares the signature of an op, or of a layer's ``forward``."""

_LAYERS = "hardpoint.layers.base"
_INTERFACES = ("hardpoint_plugin_api", _LAYERS)
"""Modules, and what lies below them, whose classes are interfaces."""


def misfit(target: object) -> str | None:
    """The fault of a class as an implementation of the interfaces that it derives from; None where nothing is.

    Its attributes that implement interfaces themselves, such as a backend's cache layout, are looked at, too.
    """
    if not isinstance(target, type):
        return None
    for fault in _misfits(target):
        return fault
    for name, value in vars(target).items():
        for fault in _misfits(type(value)):
            return f"{name}: {type(value).__name__}: {fault}"
    return None


def layer_misfit(target: object, declaring: object) -> str | None:
    """The fault of a layer as a replacement of the layer ``declaring``: it is built and called in its place."""
    if not isinstance(target, type) or not isinstance(declaring, type) or target is declaring:
        return None
    for name in ("__init__", "forward"):
        wanted, found = (_signature(getattr(layer, name, None), bound=False) for layer in (declaring, target))
        if wanted and found and (fault := _difference(name, wanted, found, f"{declaring.__name__}.{name}")):
            return fault
    return None


def op_misfit(target: object, reference: Callable[..., Any], form: Form) -> str | None:
    """The fault of the target of an op contribution: it must take what the reference takes, as its form says."""
    if not callable(target):
        return None  # the op says so when it is bound
    found, wanted = _signature(target), inspect.signature(reference)
    if found is None:
        return None
    if form == "factory":
        made = "factory(context, workload, parts)"
        return _call_fails(found, made, ("context", "workload", "parts"), {})
    inputs = [p for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    scalars = [p for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY]
    takes = [*(p.name for p in inputs), *(["outputs"] if form == "out" else []), *(["*"] if scalars else [])]
    text = f"{reference.__name__}({', '.join([*takes, *(p.name for p in scalars)])})"
    calls: list[tuple[list[Parameter], list[Parameter]]] = [(inputs, scalars)]
    calls.append((inputs, [p for p in scalars if p.default is p.empty]))
    if form == "functional":
        calls.append(([p for p in inputs if p.default is p.empty], calls[-1][1]))
    for given, named in calls:  # with everything, and with what may be left out left out
        keywords = dict.fromkeys(p.name for p in named)
        if fault := _call_fails(found, text, [p.name for p in given], keywords, partial=form == "out"):
            return fault
    return None


def _call_fails(
    found: Signature, text: str, given: Any, named: Mapping[str, object], *, partial: bool = False
) -> str | None:
    """Why a call cannot be made; ``partial`` leaves open what comes behind the positional arguments."""
    try:
        (found.bind_partial if partial else found.bind)(*given, **named)
        if partial:  # what it needs by keyword must be among what it is given
            found.replace(parameters=[p for p in found.parameters.values() if p.kind is p.KEYWORD_ONLY]).bind(
                **{name: value for name, value in named.items() if _is_keyword_only(found, name)}
            )
    except TypeError as error:
        return f"cannot be called as {text}: {error}"
    return None


def _is_keyword_only(found: Signature, name: str) -> bool:
    return name in found.parameters and found.parameters[name].kind is Parameter.KEYWORD_ONLY


# Classes.


def _misfits(target: type) -> Iterator[str]:
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    if missing:
        yield f"does not define {', '.join(missing)}"
    for interface in target.__mro__:
        if interface is not target and _is_interface(interface):
            for name, wanted in vars(interface).items():
                if _is_checked(interface, name) and (fault := _of_member(target, interface, name, wanted)):
                    yield fault


def _is_interface(kind: type) -> bool:
    return any(kind.__module__ == module or kind.__module__.startswith(f"{module}.") for module in _INTERFACES)


def _is_checked(interface: type, name: str) -> bool:
    """Public methods, and constructors; that of a layer takes what the replaced layer's does, see ``layer_misfit``."""
    return interface.__module__ != _LAYERS if name == "__init__" else not name.startswith("_")


def _of_member(target: type, interface: type, name: str, wanted: object) -> str | None:
    """The fault of one member; None for what the interface itself defines, and for plain attributes."""
    found = inspect.getattr_static(target, name)
    title = f"{interface.__name__}.{name}"
    if found is wanted:
        return None
    if isinstance(wanted, property):
        is_method = inspect.isfunction(found) or isinstance(found, classmethod | staticmethod)
        return f"{name} is a method, and {title} is a property" if is_method else None
    if not (inspect.isfunction(wanted) or isinstance(wanted, classmethod)):
        return None
    if isinstance(found, property):
        return f"{name} is a property, and {title} is a method"
    if isinstance(wanted, classmethod) and inspect.isfunction(found):
        return f"{name} must be a classmethod, as {title} is"
    plain = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    if inspect.iscoroutinefunction(plain) and not inspect.iscoroutinefunction(getattr(wanted, "__func__", wanted)):
        return f"{name} is a coroutine, and {title} is not"
    is_bound = isinstance(found, staticmethod)
    theirs = _signature(getattr(target, name) if is_bound else plain, bound=is_bound)
    ours = _signature(getattr(wanted, "__func__", wanted), bound=False)
    return _difference(name, ours, theirs, title) if ours and theirs else None


def _signature(function: object, *, bound: bool = True) -> Signature | None:
    """The signature; without the first parameter unless ``bound``. None where there is none to be read."""
    if not callable(function):
        return None
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if bound:
        return found
    drops = bool(parameters) and parameters[0].kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return found.replace(parameters=parameters[1:] if drops else parameters)


def _difference(name: str, wanted: Signature, found: Signature, title: str) -> str | None:
    """In what ``found`` cannot be called as ``wanted`` can."""
    fact = next(_facts(wanted, found), None)
    if fact is None:
        return None
    return f"{name}{_written(found)} {fact}; the interface is {title}{_written(wanted)}"


def _facts(wanted: Signature, found: Signature) -> Iterator[str]:
    theirs = found.parameters
    kinds = {p.kind for p in theirs.values()}
    places = [p.name for p in theirs.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_more, takes_any = Parameter.VAR_POSITIONAL in kinds, Parameter.VAR_KEYWORD in kinds
    for place, ours in enumerate(wanted.parameters.values()):
        mine = theirs.get(ours.name)
        if ours.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            if ours.kind not in kinds:
                yield f"has no {ours}"
        elif mine is None or mine.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            swallowed = takes_any and (ours.kind is Parameter.KEYWORD_ONLY or (takes_more and place >= len(places)))
            if not swallowed:
                yield f"has no parameter {ours.name!r}"
        elif ours.kind is Parameter.KEYWORD_ONLY and mine.kind is Parameter.POSITIONAL_ONLY:
            yield f"does not take {ours.name!r} by name"
        elif ours.kind is Parameter.POSITIONAL_OR_KEYWORD and mine.kind is Parameter.KEYWORD_ONLY:
            yield f"takes {ours.name!r} by name alone"
        elif ours.kind is Parameter.POSITIONAL_OR_KEYWORD and mine.kind is Parameter.POSITIONAL_ONLY:
            yield f"does not take {ours.name!r} by name"
        elif ours.kind is Parameter.POSITIONAL_OR_KEYWORD and places.index(ours.name) != place:
            yield f"has {ours.name!r} in another place"
        elif ours.default is not ours.empty and mine.default is mine.empty:
            yield f"requires {ours.name!r}, which may be left out"
    for mine in theirs.values():
        is_required = mine.default is mine.empty and mine.kind not in (mine.VAR_POSITIONAL, mine.VAR_KEYWORD)
        if mine.name not in wanted.parameters and is_required:
            yield f"requires {mine.name!r}, which nobody gives"


def _written(signature: Signature) -> str:
    """Without annotations."""
    bare = [p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=Signature.empty))
