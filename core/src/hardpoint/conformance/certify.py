"""From an order to a certificate: runs the trials, tells whoever watches, keeps everything that was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

from hardpoint.config import EngineConfig
from hardpoint.conformance.certificate import KIT_VERSION, Certificate, describe_plugin, library_versions, now
from hardpoint.conformance.content import FileStamps, Loaded, Sources, content_of
from hardpoint.conformance.finished_cases import FinishedCases
from hardpoint.conformance.isolation import Listing, run
from hardpoint.conformance.kit import Order, case_list_digest
from hardpoint.conformance.plan import CASE_SECONDS
from hardpoint.conformance.proof import Asked
from hardpoint.conformance.trials import Result
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.wrapped import Installed, Wrapped, required_by, wrapped_by
from hardpoint_plugin_api import Contribution, PluginLoadError, UnknownNameError


class Watcher(Protocol):
    """Is told of progress; the base does nothing."""

    def begins(self, offer: Offer, listing: Listing, cases: int) -> None:
        """A contribution's trials are listed; ``cases`` of them belong to this run's shard."""

    def found(self, offer: Offer, result: Result) -> None:
        """One check was made."""


class Silent:
    """Watches and says nothing."""

    def begins(self, offer: Offer, listing: Listing, cases: int) -> None:
        """See Watcher."""

    def found(self, offer: Offer, result: Result) -> None:
        """See Watcher."""


def certify(
    plugins: PluginSet,
    order: Order,
    watcher: Watcher | None = None,
    *,
    isolated: bool = True,
    seconds: float = CASE_SECONDS,
    jobs: int | None = None,
    resume: Path | None = None,
) -> Certificate:
    """Run ``order`` and return what came out, failures and all; ``jobs`` processes at once, see ``isolation.run``.

    ``resume`` is a file that keeps the finished cases of an isolated run, which are not run again: see
    ``finished_cases.py``. Raises ConfigError where that file is of another run, or cannot be read or written.

    Raises UnknownNameError for a plugin, family, contribution, platform or setting that does not exist, ConfigError for
    a setting's bad value, and the plugin's own error where it cannot be used at all; then nothing has run. Raises
    PluginLoadError where the plugin's files, or a library's that it requires, changed while it was tried: nobody knows
    which of them were.
    """
    check(plugins, order)
    record, watcher = order.record(plugins), watcher or Silent()
    stamps, content = FileStamps(record), content_of(record)
    described, libraries = describe_plugin(record, content), library_versions(record)
    required = required_by(offer.contribution for offer in order.offers(plugins))
    wrapped = wrapped_by(required)
    device: Mapping[str, Any] = {}
    results: list[Result] = []
    listed: list[tuple[Contribution, Sequence[str]]] = []
    asked: list[Asked] = []
    sources: list[Sources] = []
    with ExitStack() as stack:
        finished = None
        if resume is not None and isolated:
            made_of = _of_a_run(order, plugins, described, libraries, wrapped)
            finished = stack.enter_context(FinishedCases(resume, made_of, stamps))
        contributions = stack.enter_context(
            closing(run(plugins, order, isolated=isolated, seconds=seconds, jobs=jobs, finished=finished))
        )
        first = 0
        for runner, listing, found in contributions:
            watcher.begins(runner.offer, listing, len(list(order.cases(listing.cases, first))))
            first += len(listing.cases)
            listed.append((runner.offer.contribution, listing.cases))
            asked.append(listing.asked)
            device = device or listing.device
            for result in found:
                results.append(result)
                watcher.found(runner.offer, result)
            if (loaded := runner.loaded()) and (known := content.sources(listing.asked.key, loaded)):
                sources.append(known)
        refusal = None
        if (changed := stamps.changed()) or content_of(record).hash != content.hash:
            refusal = f"plugin {record.title}: {changed or 'a file'} changed while it was tried: nothing is certified"
        elif difference := Installed().difference(required, wrapped):
            refusal = f"a library changed while {record.title} was tried: nothing is certified: {difference}"
        if finished is not None:
            _end(finished, device, results, bool(refusal))
        if refusal:
            raise PluginLoadError(f"{refusal}; run it again")
    oldest = finished.oldest if finished is not None else None
    return Certificate(
        plugin=described,
        device=device,
        level=order.level,
        seed=order.seed,
        results=tuple(results),
        created=oldest or now(),
        case_list=case_list_digest(listed),
        scope={"family": order.family, "name": order.name, "case": order.case},
        settings=order.settings,
        shards=(order.shard.index,),
        num_shards=order.shard.count,
        libraries=libraries,
        asked=tuple(asked),
        wrapped=wrapped,
        files=content.of(sources),
        sources=tuple(sources),
    )


def _end(finished: FinishedCases, device: Mapping[str, Any], results: Sequence[Result], refused: bool) -> None:
    """Keep the cases that ended their process, too, now that the run has come to its end; of a refused run none."""
    if refused:
        finished.drop()
        return
    for result in results:
        if result.check == "process" and finished.results_of(result.contribution, result.case, device) is None:
            own = [r for r in results if (r.contribution, r.case) == (result.contribution, result.case)]
            finished.add(result.contribution, result.case, device, own, Loaded())


def _of_a_run(
    order: Order,
    plugins: PluginSet,
    plugin: Mapping[str, Any],
    libraries: Mapping[str, str],
    wrapped: Mapping[str, Wrapped],
) -> dict[str, Any]:
    """Everything but the device that decides what a run finds, as plain data."""
    others = {r.name: r.content_hash() for r in plugins.records if r.is_usable and r.name != order.plugin}
    return {
        "other_plugins": others,  # core among them
        "kit_version": KIT_VERSION,
        "plugin": dict(plugin),
        "libraries": dict(libraries),
        "wrapped": {name: one.to_json() for name, one in wrapped.items()},
        "level": order.level,
        "seed": order.seed,
        "shard": str(order.shard),
        "family": order.family,
        "name": order.name,
        "case": order.case,
        "platform": order.platform,
        "settings": {name: dict(keys) for name, keys in order.settings.items()},
    }


def check(plugins: PluginSet, order: Order) -> None:
    """Raise what is wrong with an order, before anything is run."""
    order.offers(plugins)
    platforms = plugins.names("platform")
    if order.platform is not None and order.platform not in platforms:
        raise UnknownNameError("platform", order.platform, platforms)
    config = EngineConfig.create(model="demo", plugin_config=order.settings)
    config.with_plugin_keys(plugins.config_keys())
