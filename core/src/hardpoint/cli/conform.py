"""``hardpoint conform``: whether a plugin's kernels are right; and ``merge-certificates``, which joins shards."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hardpoint.conformance.kit import SEEDS, TIMEOUTS, Order, Shard, not_tried_here
from hardpoint.conformance.plan import CASE_SECONDS, Level
from hardpoint.conformance.proof import tally
from hardpoint.extras import require_extra
from hardpoint.plugin_host import discover
from hardpoint.terminal.output import check_writable, make_folder, print_json, print_table, write_text
from hardpoint_plugin_api import ConfigError

if TYPE_CHECKING:
    from hardpoint.conformance.certificate import Certificate
    from hardpoint.conformance.isolation import Listing
    from hardpoint.conformance.proof import Proof, Tally
    from hardpoint.conformance.trials import Result
    from hardpoint.plugin_host import Offer

_MOST_FAILURES, _MOST_FAULTS = 20, 3
_MOST_REASONS = 12


class _ShardType(click.ParamType[Shard]):
    name = "I/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shard:
        try:
            return value if isinstance(value, Shard) else Shard.parse(value)
        except ValueError:
            self.fail(f"{value!r} is no shard; write I/N, as in 2/8, with I from 1 to N", param, ctx)


_COMPACT = click.option(
    "--compact",
    is_flag=True,
    help="With --json: counts for each check in place of the cases, small enough to ship in a plugin's package.",
)


def _settings(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, dict[str, str]]:
    """``plugin.key=value`` as sections."""
    sections: dict[str, dict[str, str]] = {}
    for text in given:
        key, equals, value = text.partition("=")
        plugin, dot, name = key.partition(".")
        if not (plugin and dot and name and equals):
            raise ConfigError(f"--setting {text!r}: write PLUGIN.KEY=VALUE, as in acme.tile=8")
        sections.setdefault(plugin, {})[name] = value
    return sections


@click.command(short_help="Prove a plugin's kernels, case by case.")
@click.argument("plugin")
@click.option("--family", metavar="FAMILY", help="Family whose contributions are tested. Default: all.")
@click.option("--name", metavar="NAME", help="Name of the contribution to test. Default: all.")
@click.option(
    "--level",
    type=click.Choice(get_args(Level)),
    default="quick",
    show_default=True,
    help="Which combinations of claims are tested: every pair (quick), every triple (full), or all (exhaustive).",
)
@click.option(
    "--seed",
    type=click.IntRange(SEEDS[0], SEEDS[-1]),
    default=0,
    show_default=True,
    help="Seed of the random inputs.",
)
@click.option(
    "--shard",
    type=_ShardType(),
    default="1/1",
    show_default=True,
    help="Part I of N of the cases to run, such as 2/4; 'hardpoint merge-certificates' joins the parts.",
)
@click.option(
    "--case",
    metavar="GLOB",
    default="*",
    help="Names of cases to run, such as 'float32/*'. A part of the cases certifies nothing.",
)
@click.option(
    "--platform",
    metavar="NAME",
    help="Platform to run on. Default: the first one that PLUGIN names and this machine has.",
)
@click.option(
    "--setting",
    "settings",
    metavar="PLUGIN.KEY=VALUE",
    multiple=True,
    callback=_settings,
    help="Setting of a plugin, as --PLUGIN.KEY of an engine. Repeatable.",
)
@click.option("--json", "json_file", metavar="FILE", help="File to write the certificate to. -: stdout.")
@_COMPACT
@click.option(
    "--report",
    "report_file",
    metavar="FILE",
    help="File for a plugin's authors: what failed, what was not proved, and this machine's versions and devices.",
)
@click.option(
    "--resume",
    "resume_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep each finished case in FILE, which may be new: after an interrupt the same command goes on from there.",
)
@click.option("--all", "everything", is_flag=True, help="Print every check of every case, and cut no table short.")
@click.option("--in-process", is_flag=True, help="Run everything in this process, for a debugger.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Number of processes at once. Default: one for each core; one process on an accelerator.",
)
@click.option(
    "--timeout",
    type=click.IntRange(TIMEOUTS[0], TIMEOUTS[-1]),
    default=int(CASE_SECONDS),
    show_default=True,
    help="Seconds that one case may take.",
)
def conform(
    plugin: str,
    json_file: str | None,
    compact: bool,
    report_file: str | None,
    resume_file: Path | None,
    everything: bool,
    in_process: bool,
    jobs: int | None,
    timeout: int,
    **order: Any,
) -> int:
    """Run the contributions of PLUGIN on the inputs that break kernels, against references in higher precision.

    Each claim of a contribution is tried; inputs that it does not claim are recorded as unsupported. The exit code is 1
    if a check failed, and if a contribution for this hardware is not proved: its values, or those of a claimed spec,
    were compared in no case. A shard is not judged by what the other shards hold: 'hardpoint merge-certificates' has
    the last word.
    """
    require_extra("conform", "hardpoint conform")
    from hardpoint.conformance.certify import certify

    _require_different(**{"--json": json_file, "--report": report_file, "--resume": resume_file})
    if resume_file is not None and in_process:
        raise ConfigError("--resume and --in-process exclude one another: a debugger's results are not kept")
    wanted, plugins = Order(plugin, **order), discover()
    _require_writable("--json", json_file)
    _require_writable("--report", report_file)
    try:
        with _Progress() as progress:
            certificate = certify(
                plugins, wanted, progress, isolated=not in_process, seconds=timeout, jobs=jobs, resume=resume_file
            )
    except KeyboardInterrupt:
        if progress.results:
            _print_tallies(tally(progress.results), f"{plugin}, up to the interrupt")
            _print_failures(progress.results, everything)
        kept = f"; the same command goes on from {resume_file}" if resume_file is not None else ""
        click.echo(f"hardpoint: interrupted; nothing is certified{kept}", err=True)
        return 130
    written = certificate.compact() if compact else certificate
    if json_file == "-":
        print_json(written.to_json())
    else:
        _print(certificate, everything, is_kept=bool(json_file))
        if json_file:
            write_text(json_file, json.dumps(written.to_json(), indent=1) + "\n")
            click.echo(_how_it_goes_on(certificate, json_file))
    if report_file:
        from hardpoint.cli.conform_report import write_report

        write_report(report_file, plugins, certificate)
    return _exit_code(certificate)


@click.command(short_help="Join the certificates of all shards of one run.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    required=True,
    help="File to write the joined certificate to. -: stdout. It is compact if one of FILES is.",
)
@_COMPACT
def merge_certificates(files: Sequence[Path], json_file: str, compact: bool) -> int:
    """Join certificates FILES, which 'hardpoint conform --shard I/N --json FILE' wrote, into one.

    Refuses shards of unlike runs (plugin content, level, seed, device, list of cases) and one that comes twice. The
    exit code is 1 if a check failed, or a contribution is not proved. One whole certificate and --compact make the
    compact one of the same run.
    """
    from hardpoint.conformance.certificate import merge, read_certificate

    check_writable("--json", json_file)
    whole = merge([read_certificate(path) for path in files])
    written = whole.compact() if compact else whole
    write_text(json_file, json.dumps(written.to_json(), indent=1) + "\n")
    if json_file != "-":
        _print(whole, everything=False)
    return _exit_code(whole)


def _require_different(**files: str | Path | None) -> None:
    """Raise ConfigError where two options name one file."""
    found: dict[str, str] = {}
    for option, file in files.items():
        if (
            file is not None
            and str(file) != "-"
            and (other := found.setdefault(os.path.realpath(file), option)) != option
        ):
            raise ConfigError(f"{other} and {option} name the same file, {file}; give each its own")
    if str(files.get("--resume")) in ("-", "."):
        raise ConfigError("--resume needs the name of a file")


def _require_writable(option: str, file: str | None) -> None:
    """Raise ConfigError where ``file`` could not be written; the folder that it belongs in is made."""
    if file and file != "-":
        make_folder(option, str(Path(file).parent))
    check_writable(option, file)


def _counts(certificate: Certificate) -> bool:
    """Whether its file would be a certificate of something: it is of a whole run, in which every check passed."""
    return certificate.is_complete and bool(certificate.outcomes["passed"]) and not certificate.outcomes["failed"]


def _exit_code(certificate: Certificate) -> int:
    if _holds_no_case(certificate):
        return 0
    outcomes = certificate.outcomes
    return 1 if outcomes["failed"] or not outcomes["passed"] or _unproved(certificate) else 0


def _unproved(certificate: Certificate) -> list[Proof]:
    """The contributions that a whole run was asked to prove and did not; a part of a run is asked for nothing."""
    return [proof for proof in certificate.proofs if proof.verdict == "not proved" and certificate.is_complete]


def _holds_no_case(certificate: Certificate) -> bool:
    """Whether it is of a part of a run to which no case fell."""
    return not certificate.tallies and len(certificate.shards) < certificate.num_shards


class _Progress(AbstractContextManager["_Progress"]):
    """A bar on a terminal, a line for each contribution elsewhere. ``results`` are all so far."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self._bar: Any = nullcontext()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[case]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: Any = None
        self._cases: set[str] = set()

    def __enter__(self) -> _Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._bar.__exit__(*raised)

    def begins(self, offer: Offer, listing: Listing, cases: int) -> None:
        """See Watcher."""
        if not hasattr(self._bar, "add_task"):
            click.echo(f"hardpoint: {offer.contribution}: {cases} cases", err=True)
        else:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(str(offer.contribution), total=cases, case="")
            self._cases = set()

    def found(self, offer: Offer, result: Result) -> None:
        """See Watcher."""
        self.results.append(result)
        if self._task is not None:
            self._cases.add(result.case)
            self._bar.update(self._task, completed=len(self._cases), case=result.case)


# Reports.


def _print(certificate: Certificate, everything: bool, *, is_kept: bool = True) -> None:
    """A line for each contribution, then failures, and the reasons why checks were not tried or claims not proved.

    With ``everything`` each check has a line, too, and no table is cut short. Unless it ``is_kept``, a line says how.
    """
    from hardpoint.conformance.certificate import OPERATOR_FOLDER

    device = certificate.device.get("name", "no device")
    title = f"{certificate.plugin['name']} {certificate.plugin['version']} on {device}, level {certificate.level}, "
    _print_tallies(certificate.tallies, f"{title}seed {certificate.seed}", certificate.proofs)
    if everything:
        _print_checks(certificate.results)
    _print_failures(certificate.results, everything)
    _print_reasons(certificate.tallies, everything)
    _print_proofs(certificate)
    for line in not_tried_here(certificate.results):
        click.echo(line)
    if not is_kept and _counts(certificate):
        file = f"{OPERATOR_FOLDER}/{certificate.plugin['name']}.json"
        click.echo(f"No certificate is kept: --json {file} keeps one, for 'explain' and --require-certified.")
    click.echo(_conclusion(certificate))


def _how_it_goes_on(certificate: Certificate, file: str) -> str:
    """The last line of a run whose certificate was written."""
    if len(certificate.shards) < certificate.num_shards:
        part = f"part {certificate.shards[0]} of {certificate.num_shards}"
        return f"{part} written to {file}; 'hardpoint merge-certificates FILES --json OUT' joins all parts"
    return f"certificate written to {file}{_how_it_is_found(Path(file))}"


def _how_it_is_found(file: Path) -> str:
    """The flag that makes engines read a certificate; nothing for a folder that they read anyway."""
    from hardpoint.conformance.certificate import OPERATOR_FOLDER
    from hardpoint.conformance.content import SHIPPED_FOLDER

    folder = file.resolve().parent
    if folder == Path(OPERATOR_FOLDER).resolve() or folder.name == SHIPPED_FOLDER:
        return ""
    return f"; 'explain' and 'serve' read it with --certificates {file.parent}"


def _print_tallies(tallies: Sequence[Tally], title: str, proofs: Sequence[Proof] = ()) -> None:
    """The verdict on each contribution."""
    verdicts, rows = {proof.key: proof.verdict for proof in proofs}, []
    for key in dict.fromkeys(t.key for t in tallies):
        own = [t for t in tallies if t.key == key]
        counts = sum((t.outcomes for t in own), Counter[str]())
        numbers = [counts[o] or None for o in ("passed", "failed", "unsupported", "skipped")]
        rows.append([*_title(key), *numbers, _nearest(own), verdicts.get(key)])
    heads = ["family", "name", "passed", "failed", "unsupported", "skipped", "nearest to a limit", "verdict"]
    print_table(heads, rows, title=title)


def _print_checks(results: Sequence[Result]) -> None:
    """The outcome of every check."""
    rows = [[r.name, r.case, r.check, r.outcome] for r in results]
    print_table(["name", "case", "check", "outcome"], rows)


def _print_failures(results: Sequence[Result], everything: bool) -> None:
    """The failures, unless ``everything`` the first ones."""
    failures = [r for r in results if r.outcome == "failed"]
    if failures:
        shown = failures if everything else failures[:_MOST_FAILURES]
        rows = [[r.name, r.case, r.check, _faults(r, everything)] for r in shown]
        print_table(["failed", "case", "check", "what"], rows)
        if len(failures) > len(shown):
            click.echo(f"... and {len(failures) - len(shown)} more; --all prints them")


def _faults(result: Result, everything: bool) -> str:
    """The faults of a failed check, one a line; unless ``everything`` the first ones."""
    faults = [str(fault) for fault in result.faults]
    shown = faults if everything else faults[:_MOST_FAULTS]
    left = len(faults) - len(shown)
    return "\n".join([*shown, *([f"... and {left} more in this case; --all prints them"] if left else [])])


def _print_reasons(tallies: Sequence[Tally], everything: bool) -> None:
    """Why something was not tried, unless ``everything`` the most frequent reasons."""
    reasons = Counter({(t.key[2], t.check, reason): n for t in tallies for reason, n in t.reasons.items()})
    if reasons:
        shown = reasons.most_common(None if everything else _MOST_REASONS)
        rows = [[name, check, n, reason] for (name, check, reason), n in shown]
        print_table(["not tried", "check", "times", "why"], rows)
        if len(reasons) > len(shown):
            click.echo(f"... and {len(reasons) - len(shown)} more reasons; --all prints them")


def _print_proofs(certificate: Certificate) -> None:
    """Print what a whole run did not prove, and claims of the rest that no comparison covers."""
    if not certificate.is_complete:
        return
    unproved = [[proof.title, "\n".join(proof.why)] for proof in _unproved(certificate)]
    if unproved:
        print_table(["not proved", "why"], unproved)
    untried = [[p.title, ", ".join(p.untried)] for p in certificate.proofs if p.verdict == "proved" and p.untried]
    if untried:
        print_table(["proved", "claimed and not tried here"], untried)


def _title(key: tuple[str, str | None, str]) -> tuple[str, str]:
    family, of, name = key
    return (f"{family} {of}" if of else family), name


def _nearest(tallies: Sequence[Tally]) -> str | None:
    """The largest share of an error's limit that was used up, and by which bound."""
    shares = [
        (error / limit, bound)
        for t in tallies
        for bound, (error, limit) in t.nearest.items()
        if bound != "outliers" and limit > 0
    ]
    return f"{max(shares)[0]:.0%} ({max(shares)[1]})" if shares else None


def _conclusion(certificate: Certificate) -> str:
    counts = certificate.outcomes
    checks = f"{counts['passed']} checks passed"
    if counts["failed"]:
        bad = dict.fromkeys(t.key[2] for t in certificate.tallies if t.outcomes["failed"])
        return f"{checks}, {counts['failed']} failed: {', '.join(bad)}"
    if _holds_no_case(certificate):
        return f"shard {certificate.shards[0]}/{certificate.num_shards} holds none of these cases"
    if not counts["passed"]:
        why = (
            "could be tried here"
            if certificate.tallies
            else "has a name that --case matches; --json of a run without --case lists the names"
        )
        return f"nothing was proved: no case {why}"
    if not certificate.is_complete:
        return f"{checks}, none failed; this is a part of a run and certifies nothing by itself"
    said = f"{checks}, none failed"
    if unproved := [proof.key[2] for proof in _unproved(certificate)]:
        said += f"; not proved: {', '.join(unproved)}"
    return said
