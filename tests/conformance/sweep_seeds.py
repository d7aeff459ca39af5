"""Runs checks of values with many seeds, in many processes: a right kernel has no alarm in any.

python3 tests/conformance/sweep_seeds.py cuda --family linear --seeds 100 --count 2

Prints for each contribution how many checks were made, how near any came to a limit, and the first alarms. Exits with 1
where there are any.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import click

from hardpoint.conformance.plan import Exclusions, Plan, Row

_CHECKS = ("values", "sizes", "extremes", "rows", "fresh")
_SHARE_OF_OPS = 10


@dataclass
class Seen:
    """The findings of one contribution's checks."""

    checks: int = 0
    alarms: list[str] = field(default_factory=list)
    nearest: dict[str, tuple[float, str]] = field(default_factory=dict)
    unsupported: Counter[str] = field(default_factory=Counter)

    def add(self, other: Seen) -> None:
        """Take in what another process found."""
        self.checks += other.checks
        self.alarms += other.alarms
        self.unsupported += other.unsupported
        for bound, (share, case) in other.nearest.items():
            if share > self.nearest.get(bound, (0.0, ""))[0]:
                self.nearest[bound] = (share, case)


@dataclass(frozen=True)
class Sampled(Plan):
    """A few combinations drawn by the seed, in place of a covering array, which takes longer than most kernels."""

    count: int = 1

    def combinations(self, factors: Mapping[str, Sequence[Any]], excludes: Exclusions | None = None) -> Iterator[Row]:
        """Yield ``count`` combinations that go together."""
        rng, made = random.Random(self.seed), 0
        for _ in range(1000 * self.count):
            row = {name: rng.choice(values) for name, values in factors.items()}
            clashes = (clash(*(row[name] for name in names)) for names, clash in (excludes or {}).items())
            if made < self.count and not any(clashes):
                made += 1
                yield row


def one_seed(platform: str, plugin: str, family: str, names: tuple[str, ...], count: int, seed: int) -> dict[str, Seen]:
    """By contribution, what ``count`` trials of one seed found (of ops, one of ten cases)."""
    from hardpoint.conformance.generators import generator_for
    from hardpoint.conformance.site import Site, Subject
    from hardpoint.plugin_host import discover

    plugins = discover()
    site = Site.open(plugins, platform, {"cpu": {"threads": 1}} if platform == "cpu" else None)
    found: dict[str, Seen] = {}
    for contribution in plugins.record(plugin).contributions:
        if contribution.family != family or (names and contribution.name not in names):
            continue
        if contribution.platforms and platform not in contribution.platforms:
            continue
        offer = next(
            o for o in plugins.offers(family, contribution.of) if (o.plugin, o.contribution) == (plugin, contribution)
        )
        title = "/".join(filter(None, (family, contribution.of, contribution.name)))
        seen = found[title] = Seen()
        generator = generator_for(plugins, offer)
        assert generator, f"{title} has no trials"
        plan = Sampled(seed=seed, count=count)
        for number, trial in enumerate(generator.trials(Subject.load(offer, site), plan)):
            if trial.unsupported:
                seen.unsupported[trial.unsupported.code] += 1
            elif family != "op" or number % _SHARE_OF_OPS == seed % _SHARE_OF_OPS:
                checks = [check for check in trial.checks if check.name in _CHECKS]
                for name, finding in replace(trial, checks=checks).run():
                    seen.checks += 1
                    for bound, (error, limit) in finding.measured.items():
                        if error / limit > seen.nearest.get(bound, (0.0, ""))[0]:
                            seen.nearest[bound] = (error / limit, f"seed {seed}, {trial.case}, {name}")
                    seen.alarms += [f"seed {seed}, {trial.case}, {name}: {fault}" for fault in finding.faults]
    return found


def all_seeds(
    platform: str, plugin: str, family: str, names: tuple[str, ...], count: int, seeds: int, jobs: int, limit: float
) -> tuple[int, dict[str, Seen]]:
    """How many seeds were tried, and what all of them together found."""
    total: dict[str, Seen] = {}
    done, until = 0, time.monotonic() + limit
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    made = [pool.submit(one_seed, platform, plugin, family, names, count, seed) for seed in range(seeds)]
    try:
        for future in as_completed(made, timeout=until - time.monotonic()):
            done += 1
            for title, seen in future.result().items():
                total.setdefault(title, Seen()).add(seen)
    except TimeoutError:
        for process in pool._processes.values():
            process.kill()
    pool.shutdown(cancel_futures=True)
    return done, total


@click.command()
@click.argument("plugin")
@click.option("--family", default="linear", help="The family of contributions to try.")
@click.option("--name", "names", multiple=True, help="A contribution's name; may be repeated. All by default.")
@click.option("--platform", default=None, help="Where to run; the plugin's name by default.")
@click.option("--seeds", default=100, help="Seeds to try, from 0.")
@click.option("--count", default=1, help="Trials of each contribution for each seed.")
@click.option("--jobs", default=os.cpu_count() or 1, help="Processes at once.")
@click.option("--limit", default=3600.0, help="Seconds after which no more seeds are tried.")
def main(
    plugin: str,
    family: str,
    names: tuple[str, ...],
    platform: str | None,
    seeds: int,
    count: int,
    jobs: int,
    limit: float,
) -> None:
    """Try the contributions of PLUGIN with many seeds."""
    alarms = 0
    done, found = all_seeds(platform or plugin, plugin, family, names, count, seeds, jobs, limit)
    print(f"{family}: {done} of {seeds} seeds, {count} trials of each contribution and seed")
    for title, seen in found.items():
        near = ", ".join(f"{bound} {share:.2f}" for bound, (share, _) in sorted(seen.nearest.items()))
        print(f"{title}: {seen.checks} checks, {len(seen.alarms)} alarms; nearest: {near}", flush=True)
        alarms += len(seen.alarms)
        for alarm in seen.alarms[:8]:
            print(f"    {alarm[:400]}", flush=True)
    raise SystemExit(1 if alarms else 0)


if __name__ == "__main__":
    main()
