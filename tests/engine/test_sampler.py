"""The sampler alone: its state by slot against the definitions, over random lives of slots, and the work it does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from hardpoint.engine.execution.sampling.logits_state import LogitsState, SlotSets, TokenBias
from hardpoint.engine.execution.sampling.sampler import Sampled, Sampler, SamplingOps
from hardpoint.engine.scheduling.step import NewRequest, ScheduledRequest, SlotSampling
from hardpoint.ops.apply_logit_bias import apply_logit_bias
from hardpoint.ops.apply_penalties import apply_penalties
from hardpoint.ops.keep_tokens import keep_tokens
from hardpoint.ops.mask_tokens import mask_tokens
from hardpoint.ops.sampling import argmax_tokens, philox_uniform, sample_tokens
from hardpoint.ops.token_logprobs import token_logprobs
from hardpoint.resources import EngineResources
from tests.support.sampling import changed_logits

VOCABULARY, SLOTS = 7, 4
GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 0)
RANDOM = SlotSampling(1.0, 3, 0.9, 0.0, 5)
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 2.0,
    "logit_bias": ((2, 1.0),),
    "allowed_token_ids": (1, 2),
    "logprobs": 1,
}
OPS = SamplingOps(
    argmax=argmax_tokens.reference,
    sample=sample_tokens.reference,
    uniform=philox_uniform.reference,
    mask=mask_tokens.reference,
    bias=apply_logit_bias.reference,
    penalize=apply_penalties.reference,
    rank=token_logprobs.reference,
    keep=keep_tokens.reference,
)


@dataclass
class Life:
    """A request as the test knows it."""

    prompt: list[int]
    output: list[int]
    sampling: SlotSampling


def new_sampler(ops: SamplingOps = OPS) -> Sampler:
    resources = EngineResources()
    state = LogitsState(resources, SLOTS, VOCABULARY, max_model_len=512)
    resources.allocate(torch.device("cpu"))
    return Sampler(ops, state, torch.device("cpu"))


def take_slot(sampler: Sampler, slot: int, life: Life) -> None:
    new = NewRequest(slot, (*life.prompt, *life.output), life.sampling, len(life.prompt))
    sampler.place_new({name: torch.from_numpy(x) for name, x in sampler.take_new([new]).items()})


def sample(sampler: Sampler, logits: torch.Tensor, lives: dict[int, Life]) -> Sampled:
    """Draw the next token of each of ``lives``, by slot."""
    positions = [len(life.prompt) + len(life.output) for life in lives.values()]
    shares = [ScheduledRequest(slot, at - 1, 1, (), True) for slot, at in zip(lives, positions, strict=True)]
    return sampler.sample(logits, shares, torch.tensor(list(lives)), torch.tensor(positions))


def random_life(rng: random.Random) -> Life:
    def maybe(value: Callable[[], Any], otherwise: Any) -> Any:
        return value() if rng.random() < 0.3 else otherwise

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    sampling = replace(
        GREEDY,
        repetition_penalty=maybe(lambda: rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(lambda: rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(lambda: rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(lambda: tuple((token, rng.uniform(-3, 3)) for token in {*tokens(3)}), ()),
        bad_words=maybe(lambda: tuple(tokens(rng.randint(1, 4)) for _ in range(rng.randint(1, 9))), ()),
        allowed_token_ids=maybe(lambda: tokens(5), None),
        min_tokens=maybe(lambda: rng.randint(1, 6), 0),
        stop_token_ids=(*tokens(2), VOCABULARY + 100),
    )
    return Life(list(tokens(rng.randint(1, 6))), [], sampling)


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_of_slots_follow_the_definitions(seed: int) -> None:
    """Requests come, draw, are preempted, resume in another slot and go; which of them draw in a step varies."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sampler = new_sampler()
    lives: dict[int, Life] = {}
    checked = 0
    for _ in range(150):
        slot = rng.randrange(SLOTS)
        if rng.random() < 0.2 or not lives:
            lives[slot] = random_life(rng)
            take_slot(sampler, slot, lives[slot])
        elif rng.random() < 0.2:
            moved = lives.pop(rng.choice(list(lives)))
            lives[slot] = moved
            take_slot(sampler, slot, moved)
        drawing = {slot: lives[slot] for slot in sorted(lives, key=lambda _: rng.random()) if rng.random() < 0.8}
        if not drawing:
            continue
        logits = torch.randn(len(drawing), VOCABULARY, generator=generator) * 2
        tokens = sample(sampler, logits, drawing).tokens.tolist()
        for row, life, token in zip(logits.tolist(), drawing.values(), tokens, strict=True):
            expected = changed_logits(row, life.prompt, life.output, life.sampling)
            if max(expected) > -math.inf:
                assert math.isclose(expected[token], max(expected), rel_tol=1e-5)
                checked += 1
            life.output.append(token)
    assert checked > 200


class Recorder:
    """The ops, noting which are called."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.ops = SamplingOps(**{f.name: self._noting(f.name, getattr(OPS, f.name)) for f in fields(SamplingOps)})

    def _noting(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            return op(*args, **kwargs)

        return noting


@pytest.mark.parametrize(("sampling", "work"), [(GREEDY, ["argmax", "keep"]), (RANDOM, ["uniform", "sample", "keep"])])
def test_a_plain_step_does_no_more_than_it_must(sampling: SlotSampling, work: Sequence[str]) -> None:
    """Even where other slots need everything, or the same slots did before."""
    recorder = Recorder()
    sampler = new_sampler(recorder.ops)
    busy = replace(RANDOM, **EVERYTHING)
    for slot in range(SLOTS):
        take_slot(sampler, slot, Life([1, 2], [], busy))
    lives = {slot: Life([1, 2], [], sampling) for slot in range(SLOTS - 1)}
    for slot, life in lives.items():
        take_slot(sampler, slot, life)
    assert sample(sampler, torch.randn(SLOTS - 1, VOCABULARY), lives).logprobs is None
    assert recorder.called == work
    sample(sampler, torch.randn(1, VOCABULARY), {SLOTS - 1: Life([1, 2], [], busy)})
    assert recorder.called == [*work, "mask", "bias", "penalize", "uniform", "sample", "keep", "rank"]


def test_min_tokens_cost_nothing_once_they_are_drawn() -> None:
    recorder = Recorder()
    sampler = new_sampler(recorder.ops)
    life = Life([1], [], replace(GREEDY, min_tokens=2, stop_token_ids=(3,)))
    take_slot(sampler, 0, life)
    for _ in range(4):
        life.output.append(int(sample(sampler, torch.randn(1, VOCABULARY), {0: life}).tokens))
    assert recorder.called == ["bias", "argmax", "keep"] * 2 + ["argmax", "keep"] * 2


def test_a_greedy_slot_stays_greedy_beside_one_that_is_not() -> None:
    sampler = new_sampler()
    lives = {0: Life([1], [], RANDOM), 1: Life([1], [], replace(RANDOM, temperature=50.0))}
    for slot, life in lives.items():
        take_slot(sampler, slot, life)
    lives[1] = Life([1], [], GREEDY)
    take_slot(sampler, 1, lives[1])
    for position in range(20):
        logits = torch.randn(2, VOCABULARY)
        assert int(sample(sampler, logits, lives).tokens[1]) == int(logits[1].argmax())
        for life in lives.values():
            life.output.append(position % VOCABULARY)


def test_state_as_wide_as_the_vocabulary_is_declared() -> None:
    """Two bits and a counter for each slot and token: of 16 bits where that is enough for the longest sequence."""
    for longest, counter in ((2**15 - 1, 2), (2**15, 4)):
        resources = EngineResources()
        state = LogitsState(resources, 3, 1000, longest)
        declared = 3 * (1000 * counter + 2 * 125)
        assert declared <= resources.total_bytes <= declared + 3 * 256
        resources.allocate(torch.device("cpu"))
        assert state.drawn.rows.shape == (3, 1000)
        assert torch.iinfo(state.drawn.rows.dtype).max >= longest


@pytest.mark.parametrize("vocabulary", [1, 8, 9, 300])
def test_sets_of_tokens(vocabulary: int) -> None:
    resources = EngineResources()
    sets = SlotSets(resources, "sets", 4, vocabulary)
    resources.allocate(torch.device("cpu"))
    last = vocabulary - 1
    sets.put(1, (last, 0, last))
    sets.put(3, (0,), all_but=True)
    masks = sets.masks(torch.tensor([3, 1, 0]))
    expected = torch.zeros(3, vocabulary, dtype=torch.bool)
    expected[0, 1:] = True
    expected[1, [0, last]] = True
    assert torch.equal(masks, expected)
    sets.put(1, ())
    assert not sets.masks(torch.tensor([1])).any()


def test_longer_bad_words_beside_it_leave_a_slots_memory_alone() -> None:
    sampler = new_sampler()
    lives = {0: Life([0], [], replace(GREEDY, bad_words=((1, 2),)))}
    take_slot(sampler, 0, lives[0])
    likes_1, likes_2 = (torch.eye(VOCABULARY)[token : token + 1] for token in (1, 2))
    assert sample(sampler, likes_1, lives).tokens.tolist() == [1]
    lives[0].output.append(1)
    take_slot(sampler, 1, Life([0], [], replace(GREEDY, bad_words=((3, 3, 3, 3, 3),) * 9)))
    assert sample(sampler, likes_2, lives).tokens.tolist() != [2]


def test_rules_that_wait_for_nothing_take_no_room_for_tokens() -> None:
    """One request's long bad word beside another's many biases: memory is no product of both."""
    part = TokenBias(apply_logit_bias.reference, 8, 1000, torch.device("cpu"))
    word, biases = tuple(range(200)), tuple((token, 1.0) for token in range(250))
    for slot, sampling in enumerate([replace(GREEDY, bad_words=(word,)), replace(GREEDY, logit_bias=biases)]):
        part.set_slot(NewRequest(slot, (1,), sampling, num_prompt_tokens=1))
    assert part._tokens.shape == (8, 256)
    assert part._behind.shape == (8, 1, 199)
