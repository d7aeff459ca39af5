"""One contribution's trials in a process of their own, or in this one.

The process reads commands as lines of JSON and answers with lines of JSON, on descriptors of its own: a kernel may
write what it likes to standard output. ``isolation.py`` is the other end.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hardpoint.conformance.content import LoadedFiles
from hardpoint.conformance.generators import generator_for, why_not_tried
from hardpoint.conformance.kit import WHOLE
from hardpoint.conformance.plan import Level, Plan
from hardpoint.conformance.proof import ELSEWHERE, Asked, asked_of, elsewhere, met_by, proving_check
from hardpoint.conformance.site import NotPresentError, Site, Subject
from hardpoint.conformance.trials import Outcome, Result, Trial
from hardpoint.plugin_host import Offer, PluginSet, discover
from hardpoint_plugin_api import DeviceInfo, HardpointError, PlatformWorkload
from hardpoint_plugin_api.requirements import SymbolRequirement


class Bench:
    """A site, the contribution that is tried on it, and its trials by case."""

    def __init__(
        self,
        plugins: PluginSet,
        offer: Offer,
        platforms: Sequence[str | None],
        plan: Plan,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.offer, self.plan = offer, plan
        self.device: DeviceInfo | None = None
        self.unfit: Result | None = None
        self._trials: dict[str, Trial] = {}
        self._site: Site | None = None
        try:
            site = Site.first_present(plugins, platforms, settings)
        except NotPresentError as error:
            self.unfit = self._whole(ELSEWHERE, "skipped", f"the platform's hardware is not here: {error}")
        else:
            self._site, self.device = site, site.platform.info
            self.unfit, self._trials = self._prepare(plugins, site)
        self.cases = list(self._trials)
        """In order."""

    def _prepare(self, plugins: PluginSet, site: Site) -> tuple[Result | None, dict[str, Trial]]:
        """Make the trials, or say why there are none."""
        contribution = self.offer.contribution
        if reason := elsewhere(contribution, site.platform.info, self.offer.api, PlatformWorkload()):
            return self._whole(ELSEWHERE, "skipped", str(reason)), {}
        generator = generator_for(plugins, self.offer)
        if generator is None:
            return self._whole("claim", "unsupported", why_not_tried(contribution)), {}
        symbols = [need for need in contribution.requires if isinstance(need, SymbolRequirement)]
        if missing := next(filter(None, (symbol.locate() for symbol in symbols)), None):
            return self._whole("claim", "unsupported", str(missing)), {}
        trials = list(generator.trials(Subject.load(self.offer, site), self.plan))
        by_case = {trial.case: trial for trial in trials}
        assert len(by_case) == len(trials), f"two trials of {contribution} are of one case"
        return None, by_case

    def _whole(self, check: str, outcome: Outcome, reason: str) -> Result:
        c = self.offer.contribution
        return Result(c.family, c.of, c.name, WHOLE, check, outcome, reason=reason)

    @property
    def described(self) -> dict[str, Any]:
        """The device, as far as certificates name it; empty where it is not here."""
        keys = ("platform", "name", "arch", "isa", "driver")
        return {key: getattr(self.device, key) for key in keys} if self.device else {}

    @property
    def asked(self) -> Asked:
        """The contributions that the kit proves here."""
        return asked_of(self.offer.contribution, self.device)

    @property
    def on_host(self) -> bool:
        """Whether trials run on the host itself, which several processes may share."""
        return self.device is not None and self.device.torch_type == "cpu"

    def run(self, case: str) -> Iterator[Result]:
        """Make the checks of one case, once, and leave the device's memory to the other processes that try kernels
        there. A trial holds its kernel and all that it drew."""
        assert self._site is not None
        c, trial = self.offer.contribution, self._trials.pop(case)
        claims = met_by(c, trial.workload, self._site.platform.info, self.offer.api) + trial.claims
        for check, finding in trial.run():
            proves = check == proving_check(c.family) and not trial.of_a_part
            yield Result(
                *(c.family, c.of, c.name, case, check, finding.outcome, finding.faults),
                reason=str(finding.unsupported or finding.skipped or ""),
                measured=finding.measured,
                compared=finding.compared if proves else 0,
                claims=claims if proves or check == "claim" else (),
            )
        del trial
        self._site.platform.memory.trim()


def offer_of(plugins: PluginSet, plugin: str, family: str, of: str | None, name: str) -> Offer:
    """Find a contribution again in another process."""
    return next(o for o in plugins.offers(family, of) if o.plugin == plugin and o.contribution.name == name)


def serve(order: Mapping[str, Any]) -> None:
    """Answer on the descriptor ``order["answers"]`` what is asked on ``order["questions"]``, until that is closed."""
    faulthandler.enable()
    answers = os.fdopen(order["answers"], "w", encoding="utf-8")

    def answer(**data: Any) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    try:
        plugins = discover()
        offer = offer_of(plugins, order["plugin"], order["family"], order["of"], order["name"])
        loaded = LoadedFiles(plugins.record(order["plugin"]))
        level: Level = order["level"]
        plan = Plan(level, order["seed"], dict(order["arrays"]))
        bench = Bench(plugins, offer, order["platforms"], plan, order["settings"])
        if order["threads"] and not bench.on_host:  # beside a device, torch on the host computes references alone
            torch.set_num_threads(order["threads"])
    except HardpointError as error:
        answer(error=str(error))
        return
    answer(
        cases=bench.cases,
        unfit=bench.unfit.to_json() if bench.unfit else None,
        device=bench.described,
        on_host=bench.on_host,
        asked=bench.asked.to_json(),
        arrays=plan.arrays,
        loaded=loaded.so_far().to_json(),
    )
    with os.fdopen(order["questions"], encoding="utf-8") as questions:
        for line in questions:
            question = json.loads(line)
            # The author of a hanging kernel wants to see first where each thread stands.
            faulthandler.dump_traceback_later(question["seconds"] * 0.9, exit=False)
            for result in bench.run(question["case"]):
                answer(result=result.to_json())
            faulthandler.cancel_dump_traceback_later()
            answer(done=question["case"], loaded=loaded.so_far().to_json())


def main(order: Mapping[str, Any]) -> None:
    """Serve an order in a process that was made for it."""
    torch.set_grad_enabled(False)
    serve(order)
