"""``hardpoint plugins new``, ``api-diff`` and ``api-reference``: what somebody who writes a plugin needs."""

from __future__ import annotations

from pathlib import Path

import click

from hardpoint.terminal.output import print_json
from hardpoint_plugin_api import ApiVersion, ConfigError


@click.command(short_help="Write a new plugin that works: kernels, tests, CI.")
@click.argument("name")
@click.option(
    "--families",
    metavar="F,F,...",
    help="Its families: op, attention, layer, linear, platform, element, quantization, experts, all2all, "
    "communicator, tool_parser, reasoning_parser.",
)
@click.option(
    "--language",
    metavar="LANGUAGE",
    default="torch",
    show_default=True,
    help="Language of the kernels: torch, triton or cpp.",
)
@click.option("--folder", metavar="FOLDER", help="Where to write it; by default ./hardpoint-NAME.")
def new(name: str, families: str | None, language: str, folder: str | None) -> None:
    """Write the plugin NAME: a package that installs, is discovered, and holds one working kernel per family.

    NAME is what users type, lower-case letters, digits and underscores.
    """
    from hardpoint.authoring.scaffold import Recipe, write

    chosen = ("op",) if families is None else tuple(part for f in families.split(",") if (part := f.strip()))
    recipe = Recipe.create(name, chosen, language)
    place = Path(folder) if folder else Path(recipe.distribution)
    for path in write(recipe, place):
        click.echo(f"  {path}")
    click.echo(f"\nNext: pip install -e '{place}[test]', then hardpoint conform {name}. See {place / 'README.md'}.")


@click.command("api-diff", short_help="Print what changed in the plugin API.")
@click.option("--since", metavar="VERSION", help="The version to compare with; by default the newest frozen one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def api_diff(since: str | None, as_json: bool) -> None:
    """Print what changed in the plugin API since a version, and what of it breaks plugins."""
    from hardpoint.authoring.api_diff import compare
    from hardpoint.authoring.api_surface import describe_api, frozen, frozen_versions

    try:
        old = frozen(ApiVersion.parse(since) if since else frozen_versions()[-1])
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--since: {error}") from None
    new = describe_api()
    changes = compare(old, new)
    if as_json:
        print_json(
            {"since": str(old.version), "api": str(new.version), "changes": [vars(change) for change in changes]}
        )
        return
    for change in changes:
        click.echo(f"{change.kind:<7}  {change.path}")
        for mark, text in (("was", change.was), ("now", change.now), ("breaks", change.breaks)):
            if text:
                click.echo(f"         {mark:<6} {text}")
    broken = sum(bool(change.breaks) for change in changes)
    state = "" if old.released else " (a draft: not released)"
    click.echo(
        f"plugin API {old.version}{state} -> {new.version}: {len(changes)} changes, "
        + (f"{broken} of them break plugins" if broken else "none breaks a plugin")
    )


@click.command("api-reference", short_help="Print the reference of the plugin API.")
def api_reference() -> None:
    """Print the reference of the plugin API as Markdown."""
    from hardpoint.authoring.api_reference import render

    click.echo(render(), nl=False)
