"""Random numbers against published vectors; draws against exact distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.ops.sampling import argmax_tokens, philox4x32, philox_uniform, sample_tokens
from tests.ops.judging import DTYPES

# kat_vectors of Random123, the authors' own library: philox4x32, 10 rounds.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    c, k = words(counter), words(key)
    got = philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))
    assert [int(word) for word in got] == [int(word) for word in words(expected)]


def test_philox_uniform_is_the_first_words_top_bits() -> None:
    got = philox_uniform.reference(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert float(got) == (0x6627E8D5 >> 8) / 2**24


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1))
def test_philox_uniform_is_below_one_and_depends_on_all_bits(seed: int, position: int) -> None:
    seeds = torch.tensor([seed, seed ^ 1, seed ^ (1 << 40), seed])
    positions = torch.tensor([position, position, position, position ^ (1 << 40)])
    got = philox_uniform.reference(seeds, positions)
    assert got.dtype == torch.float32
    assert 0 <= float(got.min()) <= float(got.max()) < 1
    assert len(set(got.tolist())) >= 3  # 24 bits may collide, though rarely


def test_philox_uniform_is_uniform() -> None:
    counts = torch.histc(philox_uniform.reference(torch.full((20_000,), 7), torch.arange(20_000)), 50, 0, 1)
    assert p_value(counts, torch.full((50,), 0.02)) > 0.001


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's chi-squared test: how likely counts at least this far from expectation are."""
    live = probabilities > 0
    assert not counts[~live].any(), "a token of probability zero was drawn"
    expected = probabilities[live].double() * counts.sum()
    statistic = ((counts[live] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(live.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if freedom else 1.0


LOGITS = [2.0, -1.0, 0.5, 3.0, 1.0, -4.0, 0.0, 2.5]


def exact(
    logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution that the settings define, token by token."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    weights = {i: w for i, w in weights.items() if w >= min_p * max(weights.values())}
    if top_k:
        kth = sorted(weights.values(), reverse=True)[min(top_k, len(weights)) - 1]
        weights = {i: w for i, w in weights.items() if w >= kth}
    total = sum(weights.values())
    weights = {
        i: w for i, w in weights.items() if top_p == 1 or sum(x for x in weights.values() if x > w) < top_p * total
    }
    total = sum(weights.values())
    return torch.tensor([weights.get(i, 0.0) / total for i in range(len(logits))])


def draw(
    logits: list[float], count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """``count`` tokens of one distribution, by the numbers of one seed."""

    def column(value: float) -> torch.Tensor:
        return torch.full((count,), value)

    uniform = philox_uniform.reference(torch.full((count,), 1234), torch.arange(count))
    k = torch.full((count,), top_k, dtype=torch.int32)
    rows = torch.tensor(logits).expand(count, -1)
    return sample_tokens.reference(rows, column(temperature), k, column(top_p), column(min_p), uniform)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.4},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 2.0, "min_p": 0.05, "top_k": 5, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.95},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(settings: dict[str, float]) -> None:
    tokens = draw(LOGITS, 20_000, **settings)  # type: ignore[arg-type]  # top_k alone is an integer, as given
    counts = torch.bincount(tokens, minlength=len(LOGITS))
    assert p_value(counts, exact(LOGITS, **settings)) > 0.001  # type: ignore[arg-type]  # the same


def test_the_test_itself_tells_distributions_apart() -> None:
    counts = torch.bincount(draw(LOGITS, 20_000), minlength=len(LOGITS))
    assert p_value(counts, exact(LOGITS, temperature=1.1)) < 0.001


def test_min_p_comes_before_top_p() -> None:
    """After min_p only the first two are left, and top_p then keeps the first alone; without it, three."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.15, 0.15)]
    assert set(draw(logits, 500, min_p=0.5, top_p=0.55).tolist()) == {0}
    assert set(draw(logits, 500, top_p=0.55).tolist()) == {0, 1}


def test_equally_likely_tokens_are_kept_or_dropped_together() -> None:
    logits = [1.0, 2.0, 2.0, 2.0, 0.0]
    assert set(draw(logits, 500, top_k=2).tolist()) == {1, 2, 3}
    assert set(draw(logits, 500, top_p=0.1).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_temperature_zero_takes_the_first_of_the_likeliest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 5.0, 5.0, 5.0]], dtype=dtype)
    zero = torch.zeros(2)
    # A slot that an earlier request used may hold anything in the other columns.
    stale = (torch.tensor([1, 0], dtype=torch.int32), zero, zero + 1, zero + 0.99)
    assert sample_tokens.reference(logits, zero, *stale).tolist() == [1, 0]
    assert argmax_tokens.reference(logits).tolist() == [1, 0]


def test_a_row_does_not_depend_on_its_batch() -> None:
    n, v = 64, 500
    logits, uniform = torch.randn(n, v) * 3, torch.rand(n)
    settings = (torch.rand(n) * 2, torch.randint(0, 50, (n,)).int(), torch.rand(n).clamp(0.1), torch.rand(n) * 0.1)
    settings[0][::5], settings[2][::3] = 0.0, 1.0
    together = sample_tokens.reference(logits, *settings, uniform)
    alone = [
        sample_tokens.reference(logits[i : i + 1], *(s[i : i + 1] for s in (*settings, uniform))) for i in range(n)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


def test_the_vocabulary_is_sorted_only_where_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_sorted: list[int] = []
    sort: Callable[..., object] = torch.Tensor.sort

    def counting(x: torch.Tensor, **kwargs: object) -> object:
        rows_sorted.append(x.shape[0])
        return sort(x, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", counting)
    logits, one, off, uniform = torch.randn(4, 50), torch.ones(4), torch.zeros(4, dtype=torch.int32), torch.rand(4)
    sample_tokens.reference(logits, one, off, one, one * 0.1, uniform)
    sample_tokens.reference(logits, one * 0, off + 3, one * 0.5, one, uniform)
    sample_tokens.reference(logits, one, off - 1, one, one * 0, uniform)
    assert rows_sorted == []
    off[2] = 5
    sample_tokens.reference(logits, one, off, one, one * 0, uniform)
    assert rows_sorted == [1]


def test_extreme_numbers_draw_tokens_that_can_be_drawn() -> None:
    logits = torch.full((4, 1000), float("-inf"))
    logits[:, 10:13] = torch.tensor([0.0, 0.1, -0.1])
    uniform = torch.tensor([0.0, 1 - 2**-24, 0.5, 1 - 2**-24])
    ones = torch.ones(4)
    tokens = sample_tokens.reference(logits, ones, torch.zeros(4, dtype=torch.int32), ones, ones * 0, uniform)
    assert set(tokens.tolist()) <= {10, 11, 12}
    assert tokens[0] == 10
    assert tokens[1] == 12
    broken = sample_tokens.reference(
        logits * float("nan"), ones, torch.zeros(4, dtype=torch.int32), ones, ones, uniform
    )
    assert all(0 <= token < 1000 for token in broken.tolist())
