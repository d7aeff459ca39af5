"""The report of a run of the conformance kit: what somebody with the hardware sends to a plugin's authors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from hardpoint.cli.env import collect
from hardpoint.terminal.output import write_text

if TYPE_CHECKING:
    from hardpoint.conformance.certificate import Certificate
    from hardpoint.plugin_host import PluginSet


def write_report(file: str, plugins: PluginSet, certificate: Certificate) -> None:
    """Write a report to ``file``, and print its contents and its receiver to stderr.

    It is JSON: ``environment`` as ``hardpoint env --json`` prints it; ``certificate`` in its compact form, with counts
    for each check; ``failures``, every failed check with its faults; ``not_proved``, contributions with the reasons, or
    null for a part of a run, which does not say.
    """
    failures = [result.to_json() for result in certificate.results if result.outcome == "failed"]
    not_proved, unproved = None, "no word on what is not proved, since this is a part of a run"
    if certificate.is_complete:
        not_proved = {proof.title: list(proof.why) for proof in certificate.proofs if proof.verdict == "not proved"}
        unproved = f"{len(not_proved)} contributions that are not proved for this hardware"
    report = {
        "schema": 1,
        "environment": collect(plugins),
        "certificate": certificate.compact().to_json(),
        "failures": failures,
        "not_proved": not_proved,
    }
    write_text(file, json.dumps(report, indent=1) + "\n")
    click.echo(
        f"report written to {file}: {len(failures)} failed checks, {unproved}, and the versions, devices and path of "
        "Python of this machine. Read it, and send it to the authors of "
        f"{certificate.plugin['name']} {certificate.plugin['version']}.",
        err=True,
    )
