"""The flags of every command that builds an engine, made of EngineConfig's fields and the plugins' own keys."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click

from hardpoint.config import SETTINGS, EngineConfig, Group, PluginKeys, group_of, load_config
from hardpoint.config.errors import flag_of
from hardpoint.config.settings import metavar_of
from hardpoint.config.vllm_names import FlagNames, translate_flags
from hardpoint.terminal.lazy import HELP_OPTIONS
from hardpoint_plugin_api import ConfigError, ConfigKey

DEFAULTS = {"model": "demo"}
_CONFIG = "config_file"


class EngineCommand(click.Command):
    """A command whose function gets ``config: EngineConfig``, joined of --config FILE, MODEL and the flags.

    Flags arrive as text: EngineConfig alone decides what is valid, and says so in the same words as for a file.
    ``title`` is that of the command's own options in ``--help``; the engine's follow in the groups of their settings.
    """

    def __init__(self, *args: Any, title: str = "Options", **options: Any) -> None:
        options.setdefault("context_settings", {"help_option_names": HELP_OPTIONS})
        super().__init__(*args, **options)
        self._title = title

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters and all that describe an engine."""
        return [*self.params, *self._engine_params, *self._plugin_params, *self._help(ctx)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, then turn what describes an engine into ``config``. Raises ConfigError."""
        try:
            rest = super().parse_args(ctx, translate_flags(args, self._names(ctx)))
        except (click.UsageError, ConfigError) as error:
            plugin_keys(quiet=False)  # a flag may be unknown because its plugin is not used
            raise error if isinstance(error, click.UsageError) else click.UsageError(str(error), ctx) from error
        flags = {key: ctx.params.pop(str(param.name)) for key, param in self._flags.items()}
        flags["use"] = flags["use"] or None  # a repeatable option that was not given is ()
        named = ctx.params.pop("model_argument")
        if named is not None:
            if flags["model"] not in (None, named):
                raise click.UsageError(f"MODEL {named} and --model {flags['model']} differ; give one", ctx)
            flags["model"] = named
        ctx.params["config"] = load_config(ctx.params.pop(_CONFIG), flags, self._plugin_keys, DEFAULTS)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options first, then each group of the engine's, then the plugins'."""
        first, *others = Group
        groups: list[tuple[str, list[click.Parameter]]] = [
            (self._title, [*self.params, *self._help(ctx)]),
            (first, [*self._file_and_model, *self._of_group(first)]),
            *((group, self._of_group(group)) for group in others),
            ("Settings of plugins", self._plugin_params),
        ]
        for title, params in groups:
            options = [param for param in params if isinstance(param, click.Option)]
            records = [record for option in options if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _names(self, ctx: click.Context) -> FlagNames:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        own = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        valued = {name for option in options if not option.is_flag and not option.count for name in option.opts}
        return FlagNames(frozenset(own), frozenset(valued))

    def _help(self, ctx: click.Context) -> list[click.Parameter]:
        option = self.get_help_option(ctx)
        return [option] if option else []

    @cached_property
    def _plugin_keys(self) -> PluginKeys:
        return plugin_keys(quiet=True)  # the engine says what is not used

    @cached_property
    def _flags(self) -> dict[str, click.Option]:
        """Every setting's option, by the setting's key."""
        own = {name: _setting_option(name) for name in SETTINGS}
        keys = {f"{plugin}.{key.name}": key for plugin, keys in self._plugin_keys.items() for key in keys.values()}
        return own | {name: _plugin_option(name, key) for name, key in keys.items()}

    @cached_property
    def _file_and_model(self) -> list[click.Parameter]:
        file = click.Option(
            ["--config", _CONFIG],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="TOML file of settings (block_size = 16). Flags override it.",
        )
        return [click.Argument(["model_argument"], required=False, metavar="[MODEL]"), file]

    @cached_property
    def _engine_params(self) -> list[click.Parameter]:
        return [*self._file_and_model, *(option for key, option in self._flags.items() if "." not in key)]

    def _of_group(self, group: Group) -> list[click.Parameter]:
        return [self._flags[name] for name in SETTINGS if group_of(name) is group]

    @cached_property
    def _plugin_params(self) -> list[click.Parameter]:
        return [option for key, option in self._flags.items() if "." in key]


def plugin_keys(*, quiet: bool) -> PluginKeys:
    """The keys of every installed plugin, with a warning of each that is not used; runs none of their code."""
    from hardpoint.plugin_host import discover

    keys: Mapping[str, Mapping[str, ConfigKey]] = discover(quiet=quiet).config_keys()
    return keys


def _setting_option(name: str) -> click.Option:
    field = EngineConfig.model_fields[name]
    help_text, flag = field.description or "", flag_of(name)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if default not in (None, {}, (), False):
        shown = "on" if default is True else ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text += f"  [default: {shown}]"
    kind = _without_none(field.annotation)
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}"], default=None, help=help_text)
    if get_origin(kind) is dict:
        return click.Option([flag], multiple=True, default=None, metavar=metavar_of(name), help=help_text)
    metavar = metavar_of(name) or _metavar(kind)
    if get_origin(kind) is tuple:  # entries of a repeated flag come one after the other
        return click.Option([flag], multiple=True, default=None, callback=_joined, metavar=metavar, help=help_text)
    return click.Option([flag], metavar=metavar, help=help_text)


def _joined(_: click.Context, __: click.Parameter, values: Sequence[str]) -> str | None:
    """A list as one text, None where the flag was not given."""
    return ",".join(values) if values else None


def _plugin_option(name: str, key: ConfigKey) -> click.Option:
    return click.Option(
        [f"--{name}", name.replace(".", "__")], metavar=key.type.upper(), help=f"{key.help}  [default: {key.default}]"
    )


def _without_none(annotation: Any) -> Any:
    """``int`` of ``int | None``; the type itself where None is not among its values."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    while hasattr(annotation, "__metadata__"):  # Annotated
        annotation = get_args(annotation)[0]
    return annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "[" + "|".join(get_args(kind)) + "]"
    return {int: "INTEGER", str: "TEXT"}.get(kind, "NAME,...")
