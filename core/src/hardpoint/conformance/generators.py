"""The kit's one extension point: who makes the trials of a contribution.

A generator serves a family, or one op, layer or model of it. Plugins bring theirs by the hook
``hardpoint_conformance``; core's own come through the same hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject, owner_of
from hardpoint.conformance.trials import Trial
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.record import CORE
from hardpoint_plugin_api import Contribution, PluginLoadError


@runtime_checkable
class Generator(Protocol):
    """Makes trials. ``family`` is the family that it serves."""

    family: str

    def serves(self, contribution: Contribution) -> bool:
        """Whether it knows what ``contribution`` (of its family) implements."""
        ...

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Yield the trials of what the subject claims, in an order that depends on nothing else than that and the plan.

        A trial of an input that is not claimed, or that the target itself refuses, is yielded as unsupported.
        """
        ...


_SAMPLES = "return {0} with samples of it from hardpoint_conformance, see docs/conformance.md"
_MISSING = {
    "tool_parser": "no samples of its syntax: " + _SAMPLES.format("ParserTrials"),
    "reasoning_parser": "no samples of its syntax: " + _SAMPLES.format("ParserTrials"),
    "quantization": "no samples of its format: " + _SAMPLES.format("QuantizationTrials"),
    "model": "neither Transformers nor a plugin has a reference: " + _SAMPLES.format("ModelTrials"),
}
"""Why a contribution of a family has no generator, and the remedy where there is one."""


def generator_for(plugins: PluginSet, offer: Offer) -> Generator | None:
    """The generator for an offer: core's, else that of the plugin that brought what it implements; None: neither.

    Of families without ``of``, such as parsers, that is the offer's own plugin. A plugin cannot make easier trials for
    what core knows. Raises PluginLoadError for a plugin that answers badly.
    """
    contribution = offer.contribution
    owner = owner_of(plugins, contribution.family, contribution.of) if contribution.of else offer.plugin
    for name in dict.fromkeys((CORE, owner)):
        for generator in _generators(plugins, name):
            if generator.family == contribution.family and generator.serves(contribution):
                return generator
    return None


def why_not_tried(contribution: Contribution) -> str:
    """Why there is no generator for a contribution."""
    what = f"{contribution.family} {contribution.of}" if contribution.of else contribution.family
    return f"the kit has no trials for {what}: {_MISSING.get(contribution.family, 'no generator serves it')}"


def _generators(plugins: PluginSet, name: str) -> Sequence[Generator]:
    plugins.activate(name)
    found: list[Generator] = []
    for generator in plugins.conformance_generators(name):
        if not isinstance(generator, Generator):
            raise PluginLoadError(
                f"plugin {name}: hardpoint_conformance must return generators of trials, "
                f"see hardpoint.conformance.generators; got {generator!r}"
            )
        found.append(generator)
    return found
