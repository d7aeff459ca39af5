"""A group of commands that are imported when they are run, so that listing them costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

import click

HELP_OPTIONS = ["-h", "--help"]
"""For every click.Context of a command: click keeps the option that it makes with the first of them."""


@dataclass(frozen=True)
class Lazy:
    """Where a command is (``"package.module:attribute"``), and its line in the list."""

    target: str
    summary: str

    def load(self) -> object:
        """Import the command."""
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module), attribute)


class LazyGroup(click.Group):
    """Commands by name. ``make`` turns what was imported into a command where it is none.

    ``elsewhere`` has names that users look for here, and where those commands are.
    """

    def __init__(
        self,
        name: str,
        entries: Mapping[str, Lazy],
        make: Callable[[str, Lazy], click.Command] | None = None,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
        **options: object,
    ) -> None:
        super().__init__(name, **options)  # type: ignore[arg-type]  # click's own keywords
        self._entries, self._make, self._elsewhere = entries, make, elsewhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order given."""
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in self._entries:
            return None
        entry = self._entries[cmd_name]
        command = self._make(cmd_name, entry) if self._make else entry.load()
        assert isinstance(command, click.Command), entry.target
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises UnknownNameError, with the nearest name, for a command that is not there."""
        if args[0] not in self._entries and not args[0].startswith("-"):
            from hardpoint_plugin_api import UnknownNameError

            place = self._elsewhere.get(args[0])
            hint = f"It is '{ctx.command_path} {place}'." if place else f"Try '{ctx.command_path} --help'."
            raise UnknownNameError("command", args[0], self._entries, hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._entries.items()])
