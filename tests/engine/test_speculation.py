"""Drafts change how many steps an output takes, and nothing of what it says, whoever drafts and however it is drawn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint import LLM, AsyncEngine, SamplingParams
from hardpoint.drafters.ngram import NgramDrafter
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.engine.execution.runner import Runner, Ticket
from hardpoint.engine.outputs import RequestOutput, RequestOutputKind
from hardpoint.engine.scheduling.step import StepInput
from hardpoint.reference.attention import ReferenceAttention
from hardpoint_cpu.recorded_list import RecordedLists
from hardpoint_plugin_api import (
    NO_DRAFT,
    AttentionBatch,
    AttentionMetadata,
    ConfigError,
    DraftCall,
    DrafterArgs,
    StepLimits,
    StructuredOutput,
)
from tests.support.engines import SMALL, small_llm

EXACT: dict[str, Any] = {"dtype": "float32"}
"""In 16 bits, rows computed together and one at a time differ by enough to draw other tokens now and then."""
NGRAM = EXACT | {"speculative_method": "ngram"}
REFRAIN = "The whale is a fish. The whale is a mammal. "
PROMPTS = ["The whale", REFRAIN * 2 + "The whale is", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3"]
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 20}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    "drawn": SamplingParams(**DRAWN),
    "truncated": SamplingParams(**DRAWN | {"temperature": 0.4}, top_p=0.9, top_k=20, min_p=0.01),
    "penalties": SamplingParams(
        **DRAWN, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4, ignore_eos=True
    ),
    "greedy_penalties": SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.3),
    "bias": SamplingParams(**DRAWN, logit_bias={44: 3.0, 12: -5.0}, bad_words=["whale", "is a"]),
    "min_tokens": SamplingParams(**DRAWN, min_tokens=12, stop_token_ids=list(range(20, 200))),
    "stop_tokens": SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(300, 330))),
    "stop_text": SamplingParams(temperature=0, max_tokens=30, stop=["fish", "the"]),
    "allowed": SamplingParams(**DRAWN, allowed_token_ids=list(range(40, 400))),
    "logprobs": SamplingParams(**DRAWN, logprobs=3, prompt_logprobs=2),
    "several": SamplingParams(**DRAWN, n=3),
    "structured": SamplingParams(
        temperature=0.5,
        seed=1,
        max_tokens=30,
        structured=StructuredOutput.regex("(The whale is a (fish|mammal)\\. ){3}"),
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ahead": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 16, "async_scheduling": True},
    "eager, few": {"enforce_eager": True, "max_num_seqs": 3, "enable_prefix_caching": False},
    "many drafts, small pages": {"num_speculative_tokens": 9, "prompt_lookup_min": 1, "block_size": 1},
}

Propose = Callable[[Sequence[int]], Sequence[int]]


def generate(llm: LLM, kinds: Sequence[str] = tuple(PARAMS)) -> list[RequestOutput]:
    """Outputs of all prompts for all ``kinds`` of parameters, in one batch."""
    each = [(prompt, PARAMS[kind]) for kind in kinds for prompt in PROMPTS]
    return llm.generate([prompt for prompt, _ in each], [params for _, params in each], use_tqdm=False)


def said(outputs: Sequence[RequestOutput]) -> list[object]:
    """Everything that users see, but for rounding in log-probabilities."""
    return [
        (
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.stop_reason,
            completion.text_ends,
            [list(position) for position in completion.logprobs or ()],
        )
        for output in outputs
        for completion in output.outputs
    ]


def logprobs(outputs: Sequence[RequestOutput]) -> list[float]:
    """All log-probabilities, of outputs and of prompts."""
    rows = [row for output in outputs for c in output.outputs for row in c.logprobs or ()]
    rows += [row for output in outputs for row in output.prompt_logprobs or () if row is not None]
    return [score.logprob for row in rows for score in row.values()]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    """The output without drafts."""
    with small_llm(Path("demo"), **EXACT) as llm:
        return generate(llm)


@pytest.fixture(scope="module", params=[False, True], ids=["depth 0", "depth 1"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with small_llm(Path("demo"), **NGRAM, async_scheduling=request.param) as engine:
        yield engine


def test_batch_invariance_makes_outputs_equal_in_16_bits() -> None:
    kinds, found = ("greedy", "drawn"), []
    for method in (None, "ngram"):
        settings: dict[str, Any] = {"speculative_method": method} if method else {}
        with small_llm(Path("demo"), dtype="bfloat16", batch_invariant=True, **settings) as llm:
            found.append(said(generate(llm, kinds)))
            assert (llm.stats.accepted_tokens > 0) == (method is not None)
    assert found[0] == found[1]


def test_more_drafts_than_a_sequence_has_tokens_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"--num-speculative-tokens 40: sequences have at most 16 tokens"),
        small_llm(Path("demo"), **NGRAM, num_speculative_tokens=40, max_model_len=16),
    ):
        pass


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_outputs_are_those_of_an_engine_without_drafts(plain: list[RequestOutput], settings: dict[str, Any]) -> None:
    with small_llm(Path("demo"), **NGRAM | settings) as llm:
        outputs = generate(llm)
        assert said(outputs) == said(plain)
        assert logprobs(outputs) == pytest.approx(logprobs(plain), abs=1e-4)
        assert llm.stats.accepted_tokens > 50
        if llm.config.block_size == 1:
            assert said(generate(llm)) == said(plain), "from the prefix cache"


def scripted(monkeypatch: pytest.MonkeyPatch, propose: Propose) -> None:
    """Have the drafter ``ngram`` propose what ``propose`` says of each sequence."""

    def tensors(self: NgramDrafter, call: DraftCall) -> torch.Tensor:
        lengths = zip(call.slots.tolist(), call.lengths.tolist(), strict=True)
        drafts = [list(propose(call.tokens[slot, :length].tolist())) for slot, length in lengths]
        width = self.args.num_drafts
        rows = [row[:width] + [NO_DRAFT] * (width - len(row)) for row in drafts]
        return torch.tensor(rows, dtype=torch.int64, device=call.slots.device)

    monkeypatch.setattr(NgramDrafter, "propose", tensors)


class Oracle:
    """Knows what is going to be said; each draft is another token with probability ``wrong``."""

    def __init__(self, outputs: Sequence[RequestOutput], wrong: float, seed: int = 0) -> None:
        self._sequences = [o.prompt_token_ids + c.token_ids for o in outputs for c in o.outputs]
        self._wrong, self._choose = wrong, random.Random(seed)

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        known = (s for s in self._sequences if len(s) > len(tokens) and s[: len(tokens)] == list(tokens))
        right = next(known, [*tokens])[len(tokens) :]
        return [token if self._choose.random() >= self._wrong else (token + 1) % 300 for token in right[:30]]


@pytest.mark.parametrize("kind", ["greedy", "greedy_penalties", "stop_text", "stop_tokens", "structured"])
def test_right_drafts_make_steps_fewer(
    llm: LLM, plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first = list(PARAMS).index(kind) * len(PROMPTS)
    expected = plain[first : first + len(PROMPTS)]
    scripted(monkeypatch, Oracle(expected, wrong=0))
    before, drafted, accepted = llm.stats.num_steps, llm.stats.drafted_tokens, llm.stats.accepted_tokens
    outputs = generate(llm, [kind])
    assert said(outputs) == said(expected)
    longest = max(len(output.outputs[0].token_ids) for output in outputs)
    assert llm.stats.num_steps - before < longest / 2
    assert llm.stats.accepted_tokens - accepted == llm.stats.drafted_tokens - drafted > 0


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wrong=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=st.integers(0, 10**6))
def test_random_drafts_change_nothing(
    llm: LLM, plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, wrong: float, seed: int
) -> None:
    with monkeypatch.context() as patch:
        scripted(patch, Oracle(plain, wrong, seed))
        assert said(generate(llm)) == said(plain)


@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_requests_go_on_as_they_were(
    plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    scripted(monkeypatch, Oracle(plain, wrong=0.3))
    tight: dict[str, Any] = {"kv_cache_memory": "1MiB", "max_model_len": 100, "async_scheduling": ahead}
    with small_llm(Path("demo"), **NGRAM, **tight) as llm:
        assert said(generate(llm)) == said(plain)
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_free_pages == llm.stats.num_pages


def test_a_request_may_be_cancelled_while_its_drafts_are_verified(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda tokens: [7, 8, 9, 7])
    core = llm.core
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    requests = [core.add_request([5, 6, 7, number], params, frozenset()) for number in range(4)]
    for number, request in enumerate(requests):
        for _ in range(2 + number):
            core.step()
        core.abort(request)
        assert request.finish_reason == "abort"
    while not core.is_idle:
        core.step()
    assert core.stats.num_free_pages == core.stats.num_pages


@pytest.mark.parametrize("kind", ["native", "reads the device", "exact"])
def test_steps_are_submitted_before_their_drafts_are_known(
    plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Unless attention plans by exact lengths. How tokens are drawn has no part in that: a few ways will do."""
    submit, slack, backend = Runner.submit, [], None if kind == "native" else "reference"
    kinds = ("greedy", "drawn", "truncated")
    expected = plain[: len(kinds) * len(PROMPTS)]
    assert kinds == tuple(PARAMS)[: len(kinds)]
    if kind == "reads the device":
        plan = ReferenceAttention.plan

        def read(self: ReferenceAttention, batch: AttentionBatch) -> AttentionMetadata:
            assert all(map(int.__ge__, batch.seq_lens_host, batch.seq_lens.tolist())), "they are bounds"
            return plan(self, replace(batch, seq_lens_host=tuple(batch.seq_lens.tolist())))

        monkeypatch.setattr(ReferenceAttention, "plan", read)
        monkeypatch.setattr(ReferenceAttention, "exact_lengths", False)

    def note(self: Runner, step: StepInput) -> Ticket:
        slack.append(max(share.slack for share in step.scheduled))
        return submit(self, step)

    monkeypatch.setattr(Runner, "submit", note)
    with small_llm(Path("demo"), **NGRAM, async_scheduling=True, attention_backend=backend) as llm:
        assert said(generate(llm, kinds)) == said(expected)
    assert (max(slack) > 0) == (kind != "exact")


@pytest.mark.parametrize("kind", ["greedy", "stop_text"])
def test_streams_take_several_tokens_at_once(
    plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first = list(PARAMS).index(kind) * len(PROMPTS)
    expected = plain[first : first + len(PROMPTS)]
    scripted(monkeypatch, Oracle(expected, wrong=0.1))

    async def run() -> list[list[str]]:
        params = replace(PARAMS[kind], output_kind=RequestOutputKind.DELTA)
        async with AsyncEngine("demo", core_process=False, **SMALL, **NGRAM, async_scheduling=True) as engine:
            streams = [await engine.submit(prompt, params) for prompt in PROMPTS]
            return [[part.outputs[0].text async for part in stream] for stream in streams]

    parts = asyncio.run(run())
    assert ["".join(each) for each in parts] == [output.outputs[0].text for output in expected]
    assert all(len(each) < len(output.outputs[0].token_ids) for each, output in zip(parts, expected, strict=True))


def test_two_ranks(plain: list[RequestOutput]) -> None:
    """Each drafts for itself, ahead of what the scheduler knows."""
    with small_llm(Path("demo"), **NGRAM, async_scheduling=True, tensor_parallel_size=2) as llm:
        assert said(generate(llm)) == said(plain)
        assert llm.stats.accepted_tokens > 50


def test_drafts_are_counted(llm: LLM) -> None:
    found = {s.name: s.value for family in llm.metrics.families for s in family.samples}
    assert found["hardpoint_drafted_tokens_total"] == llm.stats.drafted_tokens
    assert found["hardpoint_accepted_tokens_total"] == llm.stats.accepted_tokens


def test_steps_that_verify_are_replayed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def replays() -> float:
        samples = (sample for family in llm.metrics.families for sample in family.samples)
        return next(sample.value for sample in samples if sample.name == "hardpoint_graph_replays_total")

    scripted(monkeypatch, lambda tokens: [7, 8, 9, 7])
    before = replays()
    llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    assert replays() - before > 20


def test_steps_that_verify_leave_decode_steps_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedLists, "max_graphs", 4)
    lengths = [SamplingParams(temperature=0, max_tokens=8 * (i + 1), ignore_eos=True) for i in range(5)]
    with small_llm(Path("demo"), **NGRAM, async_scheduling=False) as llm:
        assert isinstance(llm.core.executor, InProcessExecutor)
        scripted(monkeypatch, lambda tokens: [])
        llm.generate(PROMPTS[:1], lengths[0], use_tqdm=False)
        (decodes,) = llm.core.executor.worker.graphs.kept
        scripted(monkeypatch, lambda tokens: [7] * 9)
        llm.generate(PROMPTS[:1] * 5, lengths, use_tqdm=False)  # five requests, then four, and so on
        kept = llm.core.executor.worker.graphs.kept
    assert len(kept) == 4
    assert decodes in kept


def test_eager_steps_with_uneven_drafts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_llm(Path("demo"), **NGRAM, async_scheduling=False) as llm:
        scripted(monkeypatch, lambda tokens: [7] * (1 + sum(tokens[:2]) % 2))
        prompts = [[1, 1, 5], [1, 2, 5]]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
        samples = [sample for family in llm.metrics.families for sample in family.samples]
    eager = {s.labels["reason"]: s.value for s in samples if s.name == "hardpoint_eager_steps_total"}
    assert eager["uneven_drafts"] >= 5
    assert eager.get("prefill", 0) <= 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_speculative_tokens": 3},
            "num_speculative_tokens = 3: speculative decoding is off; add --speculative-method",
        ),
        (
            {"num_speculative_tokens": 4},
            "num_speculative_tokens = 4: speculative decoding is off; add --speculative-method",
        ),
        (NGRAM | {"prompt_lookup_min": 5}, "prompt_lookup_min = 5 is above prompt_lookup_max = 4; set both"),
        ({"speculative_method": "ngrams"}, "ngrams"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small_llm(Path("demo"), **settings)


def test_a_platform_that_separates_phases_takes_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint_cpu.platform import CpuPlatform

    monkeypatch.setattr(CpuPlatform, "step_limits", lambda self: StepLimits(mixed_phases=False))
    with pytest.raises(ConfigError, match=r"--speculative-method: .* in steps of their own; leave it out"):
        small_llm(Path("demo"), **NGRAM)


def drafts(sequences: Sequence[Sequence[int]], **arguments: int) -> list[list[int]]:
    """The proposals of ``ngram`` for ``sequences``, which lie in some slots of a larger array."""
    args = DrafterArgs(num_drafts=3, vocab_size=100, **arguments)
    longest = max(map(len, sequences))
    tokens = torch.full((2 * len(sequences), longest + 4), 3, dtype=torch.int32)
    slots = torch.arange(1, 2 * len(sequences), 2).flip(0)
    for slot, sequence in zip(slots, sequences, strict=True):
        tokens[slot, : len(sequence)] = torch.tensor(sequence)
    call = DraftCall(tokens, slots, torch.tensor([len(sequence) for sequence in sequences]), longest)
    found: list[list[int]] = NgramDrafter(None, args).propose(call).tolist()  # type: ignore[arg-type]
    return found


def looked_up(sequence: Sequence[int], shortest: int, longest: int) -> list[int]:
    """The definition: what followed the first of the longest matches."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(sequence) - size):
            if list(sequence[start : start + size]) == list(sequence[len(sequence) - size :]):
                found = list(sequence[start + size : start + size + 3])
                return found + [NO_DRAFT] * (3 - len(found))
    return [NO_DRAFT] * 3


@pytest.mark.parametrize("longest", [255, 256, 300])
def test_ngram_counts_long_matches(longest: int) -> None:
    sequence = [*range(2, 2 + longest), 99, *range(2, 2 + longest)]
    assert drafts([sequence], prompt_lookup_min=longest, prompt_lookup_max=longest) == [[99, 2, 3]]
    assert drafts([sequence], prompt_lookup_min=longest, prompt_lookup_max=longest + 1) == [[99, 2, 3]]
    assert drafts([sequence[1:]], prompt_lookup_min=longest, prompt_lookup_max=longest) == [[NO_DRAFT] * 3]


@settings(max_examples=200, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=5),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_ngram_proposes_what_followed_the_longest_match(sequences: list[list[int]], shortest: int, more: int) -> None:
    found = drafts(sequences, prompt_lookup_min=shortest, prompt_lookup_max=shortest + more)
    assert found == [looked_up(sequence, shortest, shortest + more) for sequence in sequences]
