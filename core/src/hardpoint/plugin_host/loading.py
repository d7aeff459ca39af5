"""Import what a text names: the first code of a plugin that runs."""

from __future__ import annotations

import importlib

from hardpoint_plugin_api import API_VERSION, MANIFEST_NAME, Contribution, PluginLoadError, nearest
from hardpoint_plugin_api.requirements import SymbolRequirement

IMPORT_ERRORS = (Exception, SystemExit)
"""Errors of importing a plugin's module that do not take the process down."""


def load_target(contribution: Contribution, distribution: str) -> object:
    """Import a contribution's target, after the vendor's symbols that it requires.

    Raises PluginLoadError that names symbol or target, the cause and the fix.
    """
    for symbol in contribution.requires:
        if isinstance(symbol, SymbolRequirement):
            _check_symbol(symbol)
    try:
        return _resolve(contribution.target)
    except IMPORT_ERRORS as error:
        raise PluginLoadError(
            f"{contribution}: target {contribution.target!r} cannot be loaded: {describe(error)}; "
            f"fix: {import_fix(error, contribution.target.partition(':')[0], distribution)}"
        ) from error


def describe(error: BaseException) -> str:
    """Return the kind of ``error`` and its text."""
    return f"{type(error).__name__}: {error}"


def import_fix(error: BaseException, module: str, distribution: str) -> str:
    """Return what to do about ``error``, which importing ``module`` of ``distribution`` raised."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "hardpoint_plugin_api":
        return (
            f"pip install --upgrade hardpoint-plugin-api hardpoint-core: {distribution} uses what plugin API "
            f"{API_VERSION} does not have (its author should ask for a newer 'api' in {MANIFEST_NAME})"
        )
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing and missing != module.partition(".")[0]:
        return f"install the package that provides the module {missing!r}"
    own = f"if it is yours, correct 'target' in its {MANIFEST_NAME}"
    return f"pip install --upgrade {distribution}; {own}; to leave it out: pip uninstall {distribution}"


def _check_symbol(symbol: SymbolRequirement) -> None:
    """Raise PluginLoadError unless the symbol is there and comes from the distribution that is meant."""
    text = f"{symbol.module}:{symbol.attribute}"
    reason = symbol.locate()
    if reason:
        raise PluginLoadError(f"symbol {text!r} of {symbol.distribution}: {reason}")
    try:
        _resolve(text)
    except IMPORT_ERRORS as error:
        raise PluginLoadError(
            f"symbol {text!r} of {symbol.distribution} cannot be loaded: {describe(error)}; "
            f"fix: install a version of {symbol.distribution} that has it"
        ) from error


def _resolve(text: str) -> object:
    """Import ``"package.module:attribute.attribute"``; raises whatever the import does, or AttributeError."""
    name, _, path = text.partition(":")
    found: object = importlib.import_module(name)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            guess = nearest(attribute, dir(found))
            raise AttributeError(f"{name!r} has no {attribute!r}" + (f"; did you mean {guess!r}?" if guess else ""))
        found, name = getattr(found, attribute), f"{name}.{attribute}"
    return found
