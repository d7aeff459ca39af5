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
    """Write a report to ``file``, and print its contents and its receiver.

    It is JSON: ``environment`` as ``hardpoint env --json`` prints it; ``certificate`` in its compact form, with counts
    for each check; ``failures``, every failed check with its faults; ``not_proved``, contributions with the reasons.
    """
    failures = [result.to_json() for result in certificate.results if result.outcome == "failed"]
    asked = certificate.proofs if certificate.is_complete else ()
    not_proved = {proof.title: list(proof.why) for proof in asked if proof.verdict == "not proved"}
    report = {
        "schema": 1,
        "environment": collect(plugins),
        "certificate": certificate.compact().to_json(),
        "failures": failures,
        "not_proved": not_proved,
    }
    write_text(file, json.dumps(report, indent=1) + "\n")
    click.echo(
        f"report written to {file}: {len(failures)} failed checks, {len(not_proved)} contributions that are not proved "
        "for this hardware, and the versions, devices and path of Python of this machine. Read it, and send it to the "
        f"authors of {certificate.plugin['name']} {certificate.plugin['version']}."
    )
