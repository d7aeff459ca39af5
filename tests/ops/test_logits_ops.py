"""Penalties, bias, masks and logprobs: against their definitions and Transformers' own; planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from hardpoint.ops import get
from hardpoint.ops.apply_logit_bias import apply_logit_bias
from hardpoint.ops.apply_penalties import apply_penalties
from hardpoint.ops.mask_tokens import mask_tokens
from hardpoint.ops.sampling import philox_uniform, sample_tokens
from hardpoint.ops.slot_mapping import slot_mapping
from hardpoint.ops.token_logprobs import Ranked, token_logprobs
from tests.ops.judging import DTYPES, failures
from tests.ops.test_sampling import LOGITS, exact, p_value

penalize, bias, logprobs_of = apply_penalties.reference, apply_logit_bias.reference, token_logprobs.reference


def history(prompt: list[int], output: list[int], vocabulary: int) -> tuple[Tensor, Tensor]:
    """in_prompt and output_counts of one row."""
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocabulary).int()
    return torch.isin(torch.arange(vocabulary), torch.tensor(prompt))[None], counts[None]


def by_definition(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    """Penalised logits, token by token."""
    penalised = []
    for token, x in enumerate(logits):
        if token in prompt or token in output:
            x = x / repetition if x > 0 else x * repetition
        if token in output:
            x -= presence + frequency * output.count(token)
        penalised.append(x)
    return penalised


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (0.5, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.3), (1.3, -2.0, 2.0)],
)
def test_penalties_are_their_definition(repetition: float, presence: float, frequency: float) -> None:
    prompt, output = [0, 3, 3], [3, 5, 5, 5]
    columns = (torch.tensor([value]) for value in (repetition, presence, frequency))
    got = penalize(torch.tensor([LOGITS]), *history(prompt, output, len(LOGITS)), *columns)
    expected = by_definition(LOGITS, prompt, output, repetition, presence, frequency)
    torch.testing.assert_close(got[0], torch.tensor(expected))


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_repetition_penalty_is_transformers_own(penalty: float) -> None:
    logits = torch.randn(1, 200) * 4
    prompt, output = torch.randint(0, 200, (30,)), torch.randint(0, 200, (20,))
    ids = torch.cat([prompt, output])[None]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    off = torch.zeros(1)
    got = penalize(logits, *history(prompt.tolist(), output.tolist(), 200), torch.tensor([penalty]), off, off)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_ask_for_nothing_keep_their_logits_to_the_bit(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 300) * 5).to(dtype)
    logits[:, ::7] = float("-inf")
    one, off = torch.ones(4), torch.zeros(4)
    in_prompt, counts = torch.rand(4, 300) < 0.5, torch.randint(0, 100, (4, 300)).int()
    assert torch.equal(penalize(logits, in_prompt, counts, one, off, off), logits.float())
    assert torch.equal(bias(logits, torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3)), logits.float())
    assert torch.equal(mask_tokens.reference(logits, torch.zeros(4, 300, dtype=torch.bool)), logits)


def test_bias_and_masks_are_their_definition() -> None:
    got = bias(torch.tensor([LOGITS]), torch.tensor([[2, 5, 5, 0]]), torch.tensor([[1.5, -3.0, 0.0, float("-inf")]]))
    expected = list(LOGITS)
    expected[2], expected[5], expected[0] = expected[2] + 1.5, expected[5] - 3.0, float("-inf")
    assert got[0].tolist() == expected
    masked = mask_tokens.reference(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, False, True]]))
    assert masked[0].tolist() == [float("-inf"), 2.0, float("-inf")]


def test_logprobs_are_torchs_log_softmax() -> None:
    logits, tokens = torch.randn(20, 500) * 5, torch.randint(0, 500, (20,))
    ids, logprobs, ranks = logprobs_of(logits, tokens, top_n=7)
    every = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, every.gather(-1, ids))
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(ids[:, 1:], every.topk(7).indices)
    assert ranks[:, 1:].tolist() == [list(range(1, 8))] * 20
    order = every.argsort(-1, descending=True)
    assert ranks[:, 0].tolist() == [row.index(token) + 1 for row, token in zip(order.tolist(), tokens, strict=True)]


def test_equally_likely_tokens_share_their_rank() -> None:
    ids, _, ranks = logprobs_of(torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]), torch.tensor([3]), top_n=4)
    assert ranks.tolist() == [[2, 1, 2, 2, 4]]
    assert set(ids[0, 2:4].tolist()) == {2, 3}


def test_logprobs_never_exceed_zero() -> None:
    logits = torch.tensor([[30.0, -30.0, -31.0], [1e4, 9e3, -1e4]])
    _, logprobs, _ = logprobs_of(logits, torch.tensor([0, 0]), top_n=3)
    assert float(logprobs.max()) <= 0


@pytest.mark.parametrize(
    "truncation",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.08}, {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
@pytest.mark.parametrize("penalties", [(1.4, 0.0, 0.0), (1.0, 0.9, -0.4), (0.8, 0.5, 0.5)], ids=str)
def test_draws_from_changed_logits_follow_the_exact_distribution(
    truncation: dict[str, Any], penalties: tuple[float, float, float]
) -> None:
    """All of it at once: a mask, a bias, penalties, then each truncation and their combination."""
    prompt, output, count = [0, 3], [3, 7, 7], 20_000
    changed = [float("-inf") if token == 4 else x + (1.5 if token == 2 else 0.0) for token, x in enumerate(LOGITS)]
    changed = by_definition(changed, prompt, output, *penalties)
    logits = mask_tokens.reference(torch.tensor([LOGITS]), torch.arange(len(LOGITS))[None] == 4)
    logits = bias(logits, torch.tensor([[2]]), torch.tensor([[1.5]]))
    columns = (torch.tensor([value]) for value in penalties)
    logits = penalize(logits, *history(prompt, output, len(LOGITS)), *columns).expand(count, -1)
    uniform = philox_uniform.reference(torch.full((count,), 99), torch.arange(count))
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | truncation
    temperature, top_k, top_p, min_p = (torch.full((count,), value) for value in full.values())
    tokens = sample_tokens.reference(logits, temperature, top_k.int(), top_p, min_p, uniform)
    counts = torch.bincount(tokens, minlength=len(LOGITS))
    assert p_value(counts, exact(changed, **truncation)) > 0.001


# Faults. Each is named by what it does wrong.


def always_divides(logits: Tensor, in_prompt: Tensor, counts: Tensor, r: Tensor, p: Tensor, f: Tensor) -> Tensor:
    factor = torch.where(in_prompt | (counts > 0), r[:, None], 1.0)
    return logits.float() / factor - f[:, None] * counts - p[:, None] * (counts > 0)


def prompt_ignored(logits: Tensor, in_prompt: Tensor, *rest: Tensor) -> Tensor:
    return penalize(logits, torch.zeros_like(in_prompt), *rest)


def prompt_counted_as_output(logits: Tensor, in_prompt: Tensor, counts: Tensor, *penalties: Tensor) -> Tensor:
    return penalize(logits, in_prompt, counts + in_prompt, *penalties)


def presence_and_frequency_swapped(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, r: Tensor, p: Tensor, f: Tensor
) -> Tensor:
    return penalize(logits, in_prompt, counts, r, f, p)


def penalised_in_the_own_dtype(logits: Tensor, *rest: Tensor) -> Tensor:
    return penalize(logits, *rest).to(torch.bfloat16).float()


def bias_overwrites(logits: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    return logits.float().scatter(-1, tokens, values)


def bias_of_the_first_row(logits: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    return bias(logits, tokens[:1].expand_as(tokens), values[:1].expand_as(values))


def bans_are_finite(logits: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    return bias(logits, tokens, values.clamp(min=-1e4))


def mask_inverted(logits: Tensor, forbidden: Tensor) -> Tensor:
    return mask_tokens.reference(logits, ~forbidden)


def masked_in_place(logits: Tensor, forbidden: Tensor) -> Tensor:
    return logits.masked_fill_(forbidden, float("-inf"))


def not_normalised(logits: Tensor, tokens: Tensor, *, top_n: int) -> Ranked:
    ids, _, ranks = logprobs_of(logits, tokens, top_n=top_n)
    return ids, logits.float().gather(-1, ids), ranks


def normalised_over_the_top(logits: Tensor, tokens: Tensor, *, top_n: int) -> Ranked:
    ids, logprobs, ranks = logprobs_of(logits, tokens, top_n=top_n)
    return ids, logprobs.log_softmax(-1), ranks


def ranks_from_zero(logits: Tensor, tokens: Tensor, *, top_n: int) -> Ranked:
    ids, logprobs, ranks = logprobs_of(logits, tokens, top_n=top_n)
    return ids, logprobs, ranks - 1


def token_left_out(logits: Tensor, tokens: Tensor, *, top_n: int) -> Ranked:
    ids, logprobs, ranks = logprobs_of(logits, tokens, top_n=min(top_n + 1, logits.shape[-1]))
    return ids[:, 1:], logprobs[:, 1:], ranks[:, 1:]


slots = slot_mapping.reference


def slots_of_the_first_row(
    positions: Tensor, index: Tensor, start: Tensor, tables: Tensor, *, block_size: int
) -> Tensor:
    return slots(positions, index, start, tables[:1].expand_as(tables), block_size=block_size)


def slots_of_the_batch_row(
    positions: Tensor, index: Tensor, start: Tensor, tables: Tensor, *, block_size: int
) -> Tensor:
    return slots(positions, torch.arange(len(index)), start, tables, block_size=block_size)


def padding_is_stored(positions: Tensor, index: Tensor, start: Tensor, tables: Tensor, *, block_size: int) -> Tensor:
    ends = start.clone()
    ends[-1] = positions.shape[0]  # padding belongs to the last request
    return slots(positions, index, ends, tables, block_size=block_size)


def slot_at_the_block_edge(
    positions: Tensor, index: Tensor, start: Tensor, tables: Tensor, *, block_size: int
) -> Tensor:
    right = slots(positions, index, start, tables, block_size=block_size)
    return torch.where((positions % block_size == block_size - 1) & (right > 0), right - 1, right)


WRONG: list[tuple[str, Callable[..., Any]]] = [
    ("apply_penalties", always_divides),
    ("apply_penalties", prompt_ignored),
    ("apply_penalties", prompt_counted_as_output),
    ("apply_penalties", presence_and_frequency_swapped),
    ("apply_penalties", penalised_in_the_own_dtype),
    ("apply_logit_bias", bias_overwrites),
    ("apply_logit_bias", bias_of_the_first_row),
    ("apply_logit_bias", bans_are_finite),
    ("mask_tokens", mask_inverted),
    ("mask_tokens", masked_in_place),
    ("token_logprobs", not_normalised),
    ("token_logprobs", normalised_over_the_top),
    ("token_logprobs", ranks_from_zero),
    ("token_logprobs", token_left_out),
    ("slot_mapping", slots_of_the_first_row),
    ("slot_mapping", slots_of_the_batch_row),
    ("slot_mapping", padding_is_stored),
    ("slot_mapping", slot_at_the_block_edge),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "implementation"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_planted_faults_are_found(name: str, implementation: Callable[..., Any], dtype: torch.dtype) -> None:
    assert failures(get(name), implementation, dtype)


def logits_in_float64(logits: Tensor, tokens: Tensor, *, top_n: int) -> Ranked:
    ids, _, ranks = logprobs_of(logits, tokens, top_n=top_n)
    return ids, logits.double().log_softmax(-1).gather(-1, ids).float(), ranks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_formulations_pass(dtype: torch.dtype) -> None:
    assert not failures(token_logprobs, logits_in_float64, dtype)
