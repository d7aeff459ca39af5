"""``hardpoint plugins lock``, ``verify`` and ``doctor``: what somebody who runs Hardpoint needs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from hardpoint.plugin_host import LOCK_FILE_NAME, LockFile, discover
from hardpoint.terminal.output import print_json, print_table

_LOCK_FILE = click.option(
    "--lock-file",
    type=click.Path(path_type=Path),
    default=LOCK_FILE_NAME,
    show_default=True,
    help="The lock file.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command(short_help="Write down which plugins may be used, to the byte.")
@_LOCK_FILE
def lock(lock_file: Path) -> None:
    """Write what is installed now, core included, to the lock file that --plugins-locked enforces.

    Runs no plugin's code. Look at what is installed first ('hardpoint plugins list'): what is locked is trusted.
    """
    locked = LockFile.of(lock_file, discover().records)
    locked.write()
    for plugin in locked.plugins.values():
        libraries = "".join(f", with {name} {wrapped.version}" for name, wrapped in plugin.wrapped.items())
        editable = ", editable" if plugin.editable else ""
        click.echo(f"  {plugin.title}, {len(plugin.files)} files{editable}{libraries}")
    click.echo(f"{len(locked.plugins)} plugins are locked in {lock_file}")


@click.command(short_help="Compare what is installed with the lock file.")
@_LOCK_FILE
@_JSON
def verify(lock_file: Path, as_json: bool) -> int:
    """Say how the installed plugins, and the libraries that they require, differ from the lock file.

    The exit code is 1 if they do. Runs no plugin's code.
    """
    locked = LockFile.read(lock_file)
    found = locked.differences(discover().records)
    if as_json:
        print_json([asdict(difference) for difference in found])
    elif found:
        print_table(["plugin", "difference", "what", "fix"], [[d.plugin, d.kind, d.detail, d.fix] for d in found])
    else:
        click.echo(f"{len(locked.plugins)} plugins are as {lock_file} says")
    return 1 if found else 0


@click.command(short_help="Try each plugin on this machine: what works, and how to mend the rest.")
@click.argument("names", nargs=-1, metavar="[PLUGIN]...")
@_JSON
def doctor(names: tuple[str, ...], as_json: bool) -> int:
    """Try every installed plugin, or those named, on this machine; the exit code is 1 if one is broken, or requires a
    library that was edited after it was installed.

    This runs plugins' code: platforms look for devices, and what fits a device that is here is imported.
    """
    from hardpoint.cli.doctor import examine

    found = examine(discover(), names)
    if as_json:
        print_json([asdict(finding) for finding in found])
    else:
        print_table(
            ["plugin", "what", "state", "note", "fix"], [[f.plugin, f.about, f.state, f.note, f.fix] for f in found]
        )
    return 1 if any(finding.state in ("broken", "edited") for finding in found) else 0
