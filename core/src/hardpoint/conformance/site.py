"""Where kernels are tried, and what is tried: a platform's device with the installed plugins, and one contribution."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, cast

import torch

from hardpoint.config import EngineConfig
from hardpoint.conformance.memory import POISON
from hardpoint.context import Context, load_target
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.ops.base import CustomOp
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.record import CORE
from hardpoint.resources import EngineResources
from hardpoint.selection import Plan as SelectionPlan
from hardpoint.selection import PlanEntry, Selector, Settings, StepRange, choose_platform
from hardpoint_plugin_api import (
    NO_DEVICE,
    CheckContext,
    EngineLimits,
    Platform,
    Reason,
    Request,
    Scope,
    SelectionError,
    TokensRequirement,
    UnknownNameError,
    Workload,
)
from hardpoint_plugin_api.requirements import FeatureRequirement, OneOfRequirement

_REFERENCES = {
    "op": "reference",
    "layer": "default",
    "attention": "reference",
    "linear": "torch",
    "experts": "reference",
    "all2all": "local",
    "communicator": "torch_distributed",
}
"""The contribution of each family that is the truth of it."""

_DRAFTER = "ngram"
"""The drafter that a config with drafts names. No trial asks it for any."""

LIMITS = EngineLimits(max_tokens=8192, max_sequences=256, max_model_len=4096)
"""The limits of trials, but of those that hold more."""


def limits_of(*, tokens: int = 0, requests: int = 0, length: int = 0) -> EngineLimits:
    """The limits of trials whose steps hold so many tokens, of so many requests, of which the longest is so long."""
    return EngineLimits(
        max_tokens=max(LIMITS.max_tokens, tokens),
        max_sequences=max(LIMITS.max_sequences, requests),
        max_model_len=max(LIMITS.max_model_len, length),
    )


class TrialResources(EngineResources):
    """Scratch memory whose step scope can be spoilt between calls: nothing may rely on what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._step: set[str] = set()

    def declare(self, key: str, nbytes: int, align: int = 256, scope: Scope = "engine") -> None:
        super().declare(key, nbytes, align, scope)
        if scope == "step":
            self._step.add(key)

    def spoil(self) -> None:
        """Poison what is of step scope."""
        for key in self._step:
            self.get(key).fill_(POISON)


class ReferenceSelector(Selector):
    """Answers every request with the reference, whatever it claims: references serve any dtype, float64 included."""

    def select(self, workload: Workload, *, binding: bool = True) -> SelectionPlan:
        offers = self._plugins.offers(workload.family, workload.of)
        name = _REFERENCES[workload.family]
        offer = next((o for o in offers if o.contribution.name == name), None)
        if offer is None:
            raise UnknownNameError(workload.family, workload.of or name, (o.contribution.name for o in offers))
        made = SelectionPlan(workload, (PlanEntry(StepRange(), offer, "only candidate"),))
        return self._plans.setdefault(workload, made)


class NotPresentError(Exception):
    """The hardware of none of the platforms is here; the message says why, of each."""


@dataclass(frozen=True)
class Site:
    """A platform with one device made active, and the plugins that are installed."""

    platform: Platform
    device: torch.device
    plugins: PluginSet
    config: EngineConfig

    @classmethod
    def first_present(
        cls,
        plugins: PluginSet,
        platforms: Sequence[str | None],
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Site:
        """Open the first of ``platforms`` (None: the engine's choice) whose hardware is here; see ``open``.

        Raises NotPresentError, which names all of them, where none is. A platform that is broken is not passed over.
        """
        absent: dict[str, Reason] = {}
        for platform in platforms:
            try:
                return cls.open(plugins, platform, settings)
            except SelectionError as error:
                reasons = [reason for each in error.rejected.values() for reason in each]
                if not reasons or any(reason.code != NO_DEVICE for reason in reasons):
                    raise
                absent[str(platform)] = reasons[0]
        raise NotPresentError("; ".join(f"{name}: {reason}" for name, reason in absent.items()))

    @classmethod
    def open(
        cls, plugins: PluginSet, platform: str | None = None, settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Site:
        """Choose a platform (by name, or as an engine does) and make its first device active.

        ``settings`` are plugins' own, by plugin and key. Raises what ``choose_platform`` raises, and ConfigError.
        """
        choice = choose_platform(plugins, Settings({"platform": platform} if platform else {}))
        config = EngineConfig.create(model="demo", plugin_config=settings or {})
        config = config.with_plugin_keys(plugins.config_keys())
        chosen = choice.platform(choice.device, config.plugin_config.get(choice.plan.offer.plugin))
        return cls(chosen, chosen.activate(0), plugins, config)

    @property
    def home(self) -> str:
        """The plugin that the platform is of, whose kernels its graph engine knows."""
        offers = self.plugins.offers("platform")
        return next(offer.plugin for offer in offers if offer.contribution.name == self.platform.name)

    @property
    def free_bytes(self) -> int:
        """Memory of the device that is free now."""
        return self.platform.memory.snapshot().free

    @property
    def records_graphs(self) -> bool:
        """Whether the platform records steps, so that addresses must stay and the host must not be waited for."""
        return self.platform.graph_engine().max_graphs != 0

    def context(
        self,
        dtype: torch.dtype | str,
        *,
        kv_dtype: str | None = None,
        block_size: int = 16,
        device: torch.device | None = None,
        batch_invariant: bool = False,
        num_drafts: int = 0,
        limits: EngineLimits = LIMITS,
    ) -> Context:
        """A fresh build context, in which everything but what is under trial is served by references.

        With ``batch_invariant``, it is served by what core offers for that. Its engine verifies up to ``num_drafts``
        drafts of a request and step. No trial of what is built with it may go beyond ``limits``: workspaces are made
        for them.
        """
        dtype, info = dtype_of(dtype) if isinstance(dtype, str) else dtype, self.platform.info
        core = PluginSet(record for record in self.plugins.records if record.is_core)

        def load(offer: Offer) -> object:
            return load_target(self.plugins, offer)

        drafts = {"speculative_method": _DRAFTER, "num_speculative_tokens": num_drafts} if num_drafts else {}
        selector = (
            Selector(core, info, Settings(), load=load)
            if batch_invariant
            else ReferenceSelector(self.plugins, info, Settings(), load=load)
        )
        return Context(
            device=info,
            torch_device=device or self.device,
            dtype=dtype,
            config=self.config.model_copy(update={"batch_invariant": batch_invariant, **drafts}),
            plugins=self.plugins,
            selector=selector,
            kv_dtype=kv_dtype or dtype_name(dtype),
            block_size=block_size,
            limits=limits,
            resources=TrialResources(),
        )


@dataclass(frozen=True)
class Subject:
    """One contribution under trial. ``target`` is what its manifest names, imported."""

    offer: Offer
    target: Any
    site: Site
    threads: frozenset[int] = field(default_factory=lambda: frozenset(t.ident or 0 for t in threading.enumerate()))

    @classmethod
    def load(cls, offer: Offer, site: Site) -> Subject:
        """Import the contribution's target; raises PluginLoadError."""
        return cls(offer, load_target(site.plugins, offer), site)

    @property
    def deterministic(self) -> bool:
        """Whether equal inputs promise equal bits: unless the target says ``deterministic = False``, they do."""
        return bool(getattr(self.target, "deterministic", True))

    @property
    def capturable(self) -> bool:
        """Whether it may be recorded with a step: unless the target says ``capturable = False``, it may."""
        return bool(getattr(self.target, "capturable", True))

    @property
    def overlapped(self) -> bool:
        """Whether it begins before what was launched before it has ended: only where it says ``overlapped = True``."""
        return bool(getattr(self.target, "overlapped", False))

    def claimed(self, key: str) -> tuple[Any, ...] | None:
        """The values of a requirement such as ``dtype`` or ``block_size``; None where the contribution takes any."""
        for requirement in self.offer.contribution.requires:
            if isinstance(requirement, OneOfRequirement) and requirement.key == key:
                return requirement.on(self.site.platform.info)
        return None

    @property
    def tokens(self) -> TokensRequirement:
        """The numbers of tokens that the manifest claims."""
        requires = self.offer.contribution.requires
        return next((r for r in requires if isinstance(r, TokensRequirement)), TokensRequirement())

    def dtypes(self, key: str = "dtype") -> tuple[str, ...]:
        """The dtypes to try: those of the device that the contribution claims, widest first."""
        here = self.site.platform.info.dtypes
        claimed = self.claimed(key)
        names = here if claimed is None else here.intersection(map(str, claimed))
        return tuple(sorted(names, key=lambda name: (-dtype_of(name).itemsize, name)))

    @cached_property
    def features(self) -> frozenset[str]:
        """The workload features that the manifest claims."""
        requires = self.offer.contribution.requires
        return frozenset(name for r in requires if isinstance(r, FeatureRequirement) for name in r.names)

    def refuses(self, workload: Workload) -> Reason | None:
        """Why the contribution does not serve ``workload``: by its manifest, or by its target's own word."""
        context = CheckContext(Request(self.site.platform.info, workload), self.offer.api)
        for requirement in self.offer.contribution.requirements:
            if reason := requirement.check(context):
                return reason
        supports = cast("Callable[..., Sequence[Reason]] | None", getattr(self.target, "supports", None))
        reasons = supports(workload, self.site.platform.info) if supports else ()
        return next(iter(reasons), None)


def op_of(plugins: PluginSet, name: str) -> CustomOp[..., Any]:
    """The op called ``name``: what its declaring contribution, the one called reference, is the ``reference`` of.

    Raises UnknownNameError, and PluginLoadError where it cannot be imported.
    """
    offers = plugins.offers("op", name)
    declaring = next((o for o in offers if o.contribution.name == _REFERENCES["op"]), None)
    if declaring is None:
        raise UnknownNameError("op", name, {str(o.contribution.of) for o in plugins.offers("op")})
    module, _, path = declaring.contribution.target.partition(":")
    plugins.load(declaring)
    holder = attrgetter(path.rpartition(".")[0])(importlib.import_module(module))
    if not isinstance(holder, CustomOp):
        raise UnknownNameError("op", name, ())
    return holder


def owner_of(plugins: PluginSet, family: str, of: str | None) -> str:
    """The plugin that brought an op, layer, model or checkpoint format into being; core for families without.

    Ops and layers have a contribution that declares them; of others it is core, or the first in the plugins' order. An
    implementation of any model brings none of them into being.
    """
    declaring = _REFERENCES.get(family)
    offers = [offer for offer in plugins.offers(family, of) if offer.contribution.of == of] if of else []
    owners = [offer.plugin for offer in offers if declaring in (None, offer.contribution.name)]
    return CORE if CORE in owners or not owners else owners[0]
