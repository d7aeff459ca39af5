"""Faults planted where layers keep states behind drafts: each is caught by steps that refuse some, at level quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.conformance.families.draft_steps import DRAFTED
from hardpoint.conformance.families.layers import LayerTrials
from hardpoint.conformance.families.models import ModelTrials
from hardpoint.conformance.families.step_memory import kept_rows, num_refused
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.context import Context
from hardpoint.layers import CausalLM, CausalLMArgs, PluggableLayer
from hardpoint.layers.gated_delta_net import GatedDeltaNet
from hardpoint.layers.kimi_delta import KimiDeltaAttention
from hardpoint.layers.linear_attention import LinearAttention
from hardpoint.layers.mamba2 import Mamba2
from hardpoint.layers.states import Part, ShortConvolution, StateMetadata, StatePlanner
from hardpoint.models.nemotron_h import nemotron_h
from hardpoint_plugin_api import AttentionBatch
from tests.conformance.trying import first_failure, subject

Tensor = torch.Tensor
Layer = type[PluggableLayer]
LAYERS: dict[str, Layer] = {
    "linear_attention": LinearAttention,
    "gated_delta_net": GatedDeltaNet,
    "kimi_delta_attention": KimiDeltaAttention,
    "mamba2": Mamba2,
}
SIMPLE, *CONVOLVED = LAYERS


class PlaceOffByOne(StatePlanner):
    """A request goes on from the place behind its own."""

    def plan(self, batch: AttentionBatch) -> StateMetadata:
        step = super().plan(batch)
        return step if step.first is None else replace(step, first=(step.first + 1) % self._num_places)


class NeighboursStates(StateMetadata):
    def begin(self, plane: Tensor) -> Tensor:
        assert self.pages is not None
        assert self.first is not None
        return plane[self.pages.roll(1), self.first.roll(1)]


class AnotherRequest(StatePlanner):
    """A request goes on from the state of the one before it in the step."""

    def plan(self, batch: AttentionBatch) -> StateMetadata:
        step = super().plan(batch)
        return step if step.first is None else NeighboursStates(**vars(step))


class BehindTheLastDraft(StatePlanner):
    """A request goes on from the last token that was computed, refused or not."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._ends: dict[tuple[int, ...], int] = {}

    def plan(self, batch: AttentionBatch) -> StateMetadata:
        step, starts = super().plan(batch), (batch.seq_lens - batch.query_start.diff()).tolist()
        if step.first is None:
            return step
        rows = [tuple(row) for row in batch.block_table.tolist()]
        ends = [self._ends.get(row, start) for row, start in zip(rows, starts, strict=True)]
        self._ends |= dict(zip(rows, batch.seq_lens.tolist(), strict=True))
        return replace(step, first=self._place(torch.tensor(ends)))


class BoundsForLengths(StatePlanner):
    """The host's bounds of lengths are taken for the lengths."""

    def plan(self, batch: AttentionBatch) -> StateMetadata:
        return super().plan(replace(batch, seq_lens=torch.tensor(batch.seq_lens_host, dtype=torch.int32)))


class LastAlone(StatePlanner):
    """Of requests of unlike numbers of tokens, the states behind the last ones alone are kept."""

    def _parts(self, batch: AttentionBatch, arrays: Any) -> tuple[Part, ...]:
        parts = super()._parts(batch, arrays)
        if len(set(batch.query_start.diff().tolist())) == 1:
            return parts
        last = self._place(batch.seq_lens)
        return tuple(replace(part, places=None if part.places is None else last[part.states]) for part in parts)


class Forgets(StatePlanner):
    """Healthy; its layer does not keep what drafts take."""

    keeps_drafts = False


class WindowOffByOne(ShortConvolution):
    """A convolution goes on from the inputs behind the next token."""

    def advance(self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, plan: StateMetadata) -> Tensor:
        if plan.first is not None:
            plan = replace(plan, first=(plan.first + 1) % states.shape[1])
        return super().advance(x, weight, bias, states, plan)


class LastWindowAlone(ShortConvolution):
    """A convolution keeps the inputs of a step's last token alone, in every place."""

    def advance(self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, plan: StateMetadata) -> Tensor:
        y = super().advance(x, weight, bias, states, plan)
        if plan.first is not None and plan.pages is not None:
            last = (plan.batch.seq_lens - 1).long() % states.shape[1]
            states[plan.pages] = states[plan.pages, last][:, None]
        return y


def planned_by(planner: type[StatePlanner]) -> Callable[[Layer], Layer]:
    """Layers with another planner of their states."""

    def planted(layer: Layer) -> Layer:
        class Planted(layer):  # type: ignore[misc, valid-type]  # a class made at run time
            def __init__(self, ctx: Context, args: Any) -> None:
                super().__init__(ctx, args)
                users = ctx.cache_users.users
                users[self.index] = replace(users[self.index], planner=planner(ctx))

        return Planted

    return planted


def of_fewer(drafts: Callable[[int], int]) -> Callable[[Layer], Layer]:
    """Layers that keep states for a number of drafts that follows from the engine's."""

    def planted(layer: Layer) -> Layer:
        class Planted(layer):  # type: ignore[misc, valid-type]  # a class made at run time
            def __init__(self, ctx: Context, args: Any) -> None:
                fewer = {"num_speculative_tokens": drafts(ctx.config.num_drafts)}
                super().__init__(replace(ctx, config=ctx.config.model_copy(update=fewer)), args)

        return Planted

    return planted


def convolved_by(convolution: type[ShortConvolution]) -> Callable[[Layer], Layer]:
    """Layers with another convolution."""

    def planted(layer: Layer) -> Layer:
        class Planted(layer):  # type: ignore[misc, valid-type]  # a class made at run time
            def __init__(self, ctx: Context, args: Any) -> None:
                super().__init__(ctx, args)
                for name, part in vars(self).items():
                    if isinstance(part, ShortConvolution):
                        setattr(self, name, convolution(ctx, part._activation))

        return Planted

    return planted


PLANTED: dict[str, Callable[[Layer], Layer]] = {
    "place off by one": planned_by(PlaceOffByOne),
    "state of another request": planned_by(AnotherRequest),
    "state behind the last draft": planned_by(BehindTheLastDraft),
    "bounds for lengths": planned_by(BoundsForLengths),
    "beside others, the last state alone": planned_by(LastAlone),
    "k places for k drafts": of_fewer(lambda most: most - 1),
    "drafts ignored": of_fewer(lambda most: 0),
}
OF_CONVOLUTIONS: dict[str, Callable[[Layer], Layer]] = {
    "inputs off by one": convolved_by(WindowOffByOne),
    "inputs of the last draft": convolved_by(LastWindowAlone),
}


def tried(site: Site, name: str, layer: Layer) -> Subject:
    return subject(site, layer, "layer", name, "default", requires=[{"dtype": ["float32"]}])


@pytest.mark.parametrize("most", DRAFTED)
@pytest.mark.parametrize(
    ("title", "name"),
    [
        *((title, SIMPLE) for title in PLANTED),
        *((title, name) for title in ("drafts ignored", *OF_CONVOLUTIONS) for name in CONVOLVED),
    ],
)
def test_a_planted_fault_is_caught_by_values(site: Site, title: str, name: str, most: int) -> None:
    plant = {**PLANTED, **OF_CONVOLUTIONS}[title]
    caught = first_failure(tried(site, name, plant(LAYERS[name])), LayerTrials(), f"*/drafts-{most}", Plan())
    assert caught, f"{title} was not caught"
    assert caught.check == "values", str(caught)
    assert "exception" not in caught.codes, str(caught)


@pytest.mark.parametrize("title", PLANTED)
def test_steps_without_drafts_do_not_show_it(site: Site, title: str) -> None:
    layer = PLANTED[title](LAYERS[SIMPLE])
    assert first_failure(tried(site, SIMPLE, layer), LayerTrials(), "*/tokens-*", Plan()) is None


@pytest.mark.parametrize("name", LAYERS)
def test_a_healthy_layer_passes(site: Site, name: str) -> None:
    caught = first_failure(tried(site, name, LAYERS[name]), LayerTrials(), "*/drafts-*", Plan())
    assert caught is None, str(caught)


def test_a_layer_that_does_not_claim_it_is_not_tried(site: Site) -> None:
    layer = planned_by(Forgets)(LAYERS[SIMPLE])
    trials = [*LayerTrials().trials(tried(site, SIMPLE, layer), Plan())]
    found = [(trial.case, finding) for trial in trials for _, finding in trial.run()]
    drafted = [finding for case, finding in found if "/drafts-" in case]
    assert len(drafted) >= len(DRAFTED)
    assert {str(finding.unsupported) for finding in drafted} == {"Forgets.keeps_drafts is False"}
    assert {finding.outcome for case, finding in found if "/tokens-" in case} >= {"passed"}
    assert not [finding.faults for _, finding in found if finding.faults]


def ignoring_drafts(config: HFConfig) -> CausalLMArgs:
    """Nemotron-H, built as for an engine without drafts."""

    class Ignoring(CausalLMArgs):
        def build(self, ctx: Context) -> CausalLM:
            plain = ctx.config.model_copy(update={"num_speculative_tokens": 0})
            return super().build(replace(ctx, config=plain))

    return Ignoring(**vars(nemotron_h(config)))


def _model(site: Site, target: object) -> Subject:
    return subject(site, target, "model", "NemotronHForCausalLM", "nemotron_h")


def test_a_model_that_ignores_drafts_is_caught_by_drafts(site: Site) -> None:
    trial = next(ModelTrials().trials(_model(site, ignoring_drafts), Plan()))
    found = dict(trial.run())
    assert [check for check, finding in found.items() if finding.faults] == ["drafts"]


def test_a_model_that_does_not_claim_it_is_not_tried(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePlanner, "keeps_drafts", False)
    trial = next(ModelTrials().trials(_model(site, nemotron_h), Plan()))
    found = dict(trial.run())
    assert str(found["drafts"].unsupported) == "StatePlanner.keeps_drafts is False"
    assert {finding.outcome for check, finding in found.items() if check != "drafts"} == {"passed"}


@pytest.mark.parametrize("most", DRAFTED)
def test_steps_with_drafts_hold_the_situations_that_they_are_for(most: int) -> None:
    steps, stayed, alike, beyond = DRAFTED[most], set(), set(), 0
    for number, step in enumerate(steps):
        counts = {piece.query for piece in step if piece.query}
        alike |= counts if len(counts) == 1 else set()
        for request, piece in enumerate(step):
            refused = num_refused(steps, number, request)
            if refused and piece.query == 1 + most:
                stayed.add(piece.query - refused)
                beyond += (piece.total - 1) // 16 > (piece.total - refused - 1) // 16
    assert stayed | {1 + most} == set(range(1, 2 + most)), "a draft is refused at every place"
    assert {1, 1 + most} <= alike, "steps of decodes, and of drafts alone"
    assert all(sum(piece.query for piece in step) % 16 for step in steps), "see _steps_with_drafts"
    assert beyond, "drafts that are refused had a block of their own"
    assert all(piece.query == 1 for piece in steps[-1]), "each state is read in the end"
    assert len(kept_rows(steps)) < sum(piece.query for step in steps for piece in step)
