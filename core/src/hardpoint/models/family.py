"""From a checkpoint to a model: the family that knows its architecture, and what that makes of the config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from hardpoint.checkpoint.checkpoint import Checkpoint
from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.context import Context
from hardpoint.layers import CausalLM, ModelFacts
from hardpoint.models.transformers_code.architectures import known_architectures
from hardpoint.parallel.topology import Topology
from hardpoint.plugin_host import Offer, PluginSet
from hardpoint.plugin_host.blame import blame, misbehaved
from hardpoint.selection import Plan
from hardpoint_plugin_api import Feature, ModelWorkload, UnknownNameError
from hardpoint_plugin_api.families import ANY


class ModelArgs(Protocol):
    """A model that is not built yet: see CausalLMArgs."""

    @property
    def facts(self) -> ModelFacts:
        """Known before anything is built, since a context's limits follow from them."""
        ...

    def build(self, ctx: Context) -> CausalLM:
        """Construct the model, without weights."""
        ...


class ModelFamily(Protocol):
    """The target of a contribution of the family ``model``."""

    def __call__(self, config: HFConfig) -> ModelArgs:
        """Read a checkpoint's config; raises CheckpointError for one that is no such model's."""
        ...


@dataclass(frozen=True)
class ChosenModel:
    """A checkpoint's model, and the contribution that describes it."""

    offer: Offer
    args: ModelArgs

    @classmethod
    def of(cls, offer: Offer, family: ModelFamily, config: HFConfig) -> ChosenModel:
        """Have ``family``, the target of ``offer``, read ``config``. Raises CheckpointError, and PluginLoadError."""
        with blame(offer):
            args: object = family(config)
        if not isinstance(getattr(args, "facts", None), ModelFacts):
            raise misbehaved(offer, f"must return the arguments of a model, with its facts, got {args!r:.80}")
        return cls(offer, cast(ModelArgs, args))

    def build(self, ctx: Context) -> CausalLM:
        """Construct it, without weights, as code of its plugin."""
        return self.args.build(ctx.for_plugin(self.offer.plugin))


def known_architecture(checkpoint: Checkpoint, plugins: PluginSet) -> str:
    """The architecture of ``checkpoint``. Raises UnknownNameError for one that no plugin has, and CheckpointError."""
    architecture = checkpoint.architecture
    known = {str(offer.contribution.of) for offer in plugins.offers("model")}
    if architecture not in known and ANY in known:
        known |= known_architectures()
    if architecture not in known:
        unused = plugins.told_unused("model", architecture)
        hint = " ".join(filter(None, [f"It stands in {checkpoint.config_path}.", unused]))
        raise UnknownNameError("model architecture", architecture, known - {ANY}, hint)
    return architecture


def choose_model(
    checkpoint: Checkpoint,
    plugins: PluginSet,
    select: Callable[[ModelWorkload], Plan],
    load: Callable[[Offer], object],
    topology: Topology,
) -> ChosenModel:
    """Select the family for the architecture of ``checkpoint``, and have it read the config.

    Raises UnknownNameError for an architecture that no plugin has, SelectionError for one whose blocks cannot be
    divided as ``topology`` asks, and CheckpointError.
    """
    architecture = known_architecture(checkpoint, plugins)
    features = frozenset({Feature.PIPELINE_STAGES} if topology.pipeline > 1 else ())
    offer = select(ModelWorkload(of=architecture, features=features)).offer
    return ChosenModel.of(offer, cast(ModelFamily, load(offer)), checkpoint.config)
