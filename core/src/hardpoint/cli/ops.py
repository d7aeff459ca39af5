"""``hardpoint ops``: every named op, its reference, and who implements it."""

from __future__ import annotations

import inspect
from typing import Any

import click

from hardpoint.plugin_host import Offer, PluginSet, discover
from hardpoint.terminal.output import print_table
from hardpoint_plugin_api import UnknownNameError

_REFERENCE = "reference"


@click.group(short_help="List ops and their implementations.")
def ops() -> None:
    """List ops, or show one: signature, reference, cases and implementations."""


@ops.command("list")
def list_ops() -> None:
    """List every op with its implementations; imports none of them."""
    by_op = _by_op(discover())
    print_table(
        ["op", "implementations"],
        [[name, ", ".join(f"{o.contribution.name} ({o.plugin})" for o in offers)] for name, offers in by_op.items()],
    )


@ops.command()
@click.argument("name")
def show(name: str) -> None:
    """Show the op NAME."""
    plugins = discover()
    by_op = _by_op(plugins)
    if name not in by_op:
        raise UnknownNameError("op", name, by_op, listed_by="'hardpoint ops list'")
    reference = next((o for o in by_op[name] if o.contribution.name == _REFERENCE), None)
    if reference is not None:
        _print_definition(name, plugins.load(reference), reference.contribution.target)
    print_table(
        ["implementation", "plugin", "platforms", "priority", "form", "summary"],
        [
            [
                offer.contribution.name,
                f"{offer.plugin} {offer.version}",
                ", ".join(offer.contribution.platforms) or "any",
                offer.contribution.priority,
                offer.contribution.form,
                offer.contribution.summary,
            ]
            for offer in by_op[name]
        ],
    )


def _by_op(plugins: PluginSet) -> dict[str, list[Offer]]:
    found: dict[str, list[Offer]] = {}
    for offer in plugins.offers("op"):
        found.setdefault(str(offer.contribution.of), []).append(offer)
    return dict(sorted(found.items()))


def _print_definition(name: str, reference: Any, target: str) -> None:
    """Print what the op's file says: signature, meaning, error model, cases, and the reference itself."""
    import torch

    from hardpoint.ops.base import CustomOp

    op = _op_of(reference, target)
    click.echo(f"{name}{str(inspect.signature(reference)).replace(chr(39), '')}\n")  # annotations are quoted texts
    if doc := inspect.getdoc(reference):
        click.echo(f"{doc}\n")
    if isinstance(op, CustomOp):
        cases = op.cases(torch.Generator(), torch.float32, torch.device("cpu"))
        aliases = [f"output {index} may share the memory of {name}" for index, name in op.aliases]
        click.echo(f"mutates: {', '.join(op.mutates) or 'nothing'}")
        click.echo(f"aliases: {', '.join(aliases) or 'nothing'}")
        click.echo(f"static:  {', '.join(op.static) or 'nothing'}")
        click.echo(f"errors:  {op.errors}")
        click.echo(f"cases:   {', '.join(case.name for case in cases)}")
    click.echo(f"\n{target}\n")
    click.echo(inspect.getsource(reference))


def _op_of(reference: object, target: str) -> object:
    """The op whose reference this is: what the target's last attribute was taken from."""
    from operator import attrgetter

    holder = target.partition(":")[2].rpartition(".")[0]
    module = inspect.getmodule(reference)
    return attrgetter(holder)(module) if holder and module else None
