"""Plugins' hooks: verified before anything is registered, then called plugin by plugin in load order."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

import pluggy

from hardpoint_plugin_api import ConfigChange, DeviceInfo, EngineInfo, HookSpecs, PluginLoadError, nearest
from hardpoint_plugin_api.hooks import PROJECT

logger = logging.getLogger(__name__)

_PREFIX = "hardpoint_"


class Hooks:
    """The hooks of one set of plugins. The plugins to call are given by name, in load order, with each call."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self._offered = {
            name: [p for p in inspect.signature(spec).parameters if p != "self"]
            for name, spec in vars(HookSpecs).items()
            if name.startswith(_PREFIX)
        }

    def register(self, plugin: str, module: ModuleType) -> None:
        """Register the hooks of ``module``; raises PluginLoadError, having registered nothing, if one is wrong."""
        wrong = list(self._differences(module))
        if wrong:
            raise PluginLoadError("; ".join(wrong))
        self._manager.register(module, plugin)

    def configure(self, plugins: Iterable[str], config: Mapping[str, object], device: DeviceInfo) -> list[ConfigChange]:
        """Return every wished change; raises PluginLoadError naming the plugin whose hook raised or answered badly."""
        changes: list[ConfigChange] = []
        for plugin in plugins:
            try:
                answers = self._call(plugin, "hardpoint_configure", config=config, device=device)
            except (Exception, SystemExit) as error:
                raise PluginLoadError(
                    f"plugin {plugin}: hardpoint_configure raised {type(error).__name__}: {error}; "
                    "leave the plugin out with --plugins, or report this to its author"
                ) from error
            for answer in answers:
                if not isinstance(answer, list) or not all(map(_is_change, answer)):
                    raise PluginLoadError(
                        f"plugin {plugin}: hardpoint_configure must return a list of ConfigChange, got {answer!r}"
                    )
                changes += answer
        return changes

    def conformance(self, plugin: str) -> list[object]:
        """Return the conformance generators of one plugin; raises PluginLoadError where its hook raises."""
        try:
            answers = self._call(plugin, "hardpoint_conformance")
        except (Exception, SystemExit) as error:
            message = f"plugin {plugin}: hardpoint_conformance raised {type(error).__name__}: {error}"
            raise PluginLoadError(message) from error
        return [each for answer in answers for each in (answer if isinstance(answer, list) else [answer])]

    def notify(self, plugins: Iterable[str], hook: str, engine: EngineInfo) -> None:
        """Call a lifecycle hook of each plugin; what one raises is logged and does not stop the others."""
        for plugin in plugins:
            try:
                self._call(plugin, hook, engine=engine)
            except (Exception, SystemExit):
                logger.exception("plugin %s: %s raised; going on without it", plugin, hook)

    def _call(self, plugin: str, hook: str, **arguments: object) -> list[object]:
        others = self._manager.get_plugins() - {self._manager.get_plugin(plugin)}
        answers = self._manager.subset_hook_caller(hook, others)(**arguments)
        assert isinstance(answers, list)
        return answers

    def _differences(self, module: ModuleType) -> Iterator[str]:
        """Faults of the hooks of ``module``, each beside the valid form."""
        for name, value in vars(module).items():
            options = self._manager.parse_hookimpl_opts(module, name)
            hook = (options and options.get("specname")) or name
            if not options and not (name.startswith(_PREFIX) and callable(value)):
                continue
            if hook not in self._offered:
                guess = nearest(hook, self._offered)
                yield f"there is no hook {hook!r}; " + (
                    f"did you mean {guess!r}?" if guess else f"known: {', '.join(self._offered)}"
                )
            elif options is None:
                yield f"{name} is named like a hook but is no function marked as one; write @hookimpl above it"
            elif options.get("wrapper") or options.get("hookwrapper"):
                yield f"{name} is a wrapper, which Hardpoint's hooks do not take"
            else:
                yield from _wrong_parameters(name, value, self._offered[hook])


def _wrong_parameters(name: str, function: object, offered: list[str]) -> Iterator[str]:
    assert callable(function)
    signature = inspect.signature(function)
    unknown = [p for p in signature.parameters if p not in offered]
    special = [
        p.name
        for p in signature.parameters.values()
        if p.name in offered and (p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty)
    ]
    if unknown:
        yield (
            f"{name}({', '.join(signature.parameters)}) takes {', '.join(unknown)}, "
            f"which the hook does not offer: it offers {', '.join(offered)}"
        )
    if special:
        yield f"{name}: {', '.join(special)} would never be passed; write it as a plain parameter without a default"


def _is_change(answer: object) -> bool:
    return isinstance(answer, ConfigChange) and isinstance(answer.key, str)
