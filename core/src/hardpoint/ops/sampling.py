"""Drawing tokens: counter-based random numbers, truncated sampling, and the greedy path.

A draw depends on its row, its seed and its position alone: not on the batch around it, the rank, or how many numbers
were drawn before. Axes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.each_row import each_row
from hardpoint.ops.error_model import ErrorModel

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = 10) -> Words:
    """Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC'11).

    Words are 32-bit numbers held in int64 tensors of one shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 x 32-bit product; ``a`` goes in halves, so that int64 never overflows."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK


def _philox_cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)
    yield Case("random", (draw.integers(0, 2**62, 100), draw.integers(0, 2**40, 100)))
    yield Case("one_seed", (torch.full((64,), 42, device=device), torch.arange(64, device=device)))
    edges = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**32 - 1], device=device)
    yield Case("edges", (edges, edges.flip(0).clamp(min=0)))
    yield Case("one", (draw.integers(0, 9, 1), draw.integers(0, 9, 1)))
    yield Case("empty", (draw.integers(0, 9, 0), draw.integers(0, 9, 0)))


def _allocate_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)


@custom_op(cases=_philox_cases, errors=ErrorModel(exact=True), allocate=_allocate_uniform)
def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """seeds, positions int64 [N] -> float32 [N] in [0, 1): the first word of Philox4x32-10, its top 24 bits.

    The key is the seed's 64 bits, low word first, the counter the position's; the counter's upper half is zero.
    """
    zero = torch.zeros_like(positions)
    counter = (positions & _MASK, (positions >> 32) & _MASK, zero, zero)
    word = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))[0]
    return (word >> 8).to(torch.float32) * 2.0**-24


def _argmax_cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)
    yield Case("random", (draw.normal(5, 1000),))
    yield Case("odd", (draw.normal(3, 129),))
    yield Case("ties", (draw.integers(0, 3, 6, 500).to(dtype),))
    yield Case("equal", (torch.zeros(2, 300, dtype=dtype, device=device),))
    masked = draw.normal(4, 200)
    masked[:, :150] = float("-inf")
    yield Case("masked", (masked,))
    yield Case("strided", (draw.strided(4, 100),))
    yield Case("wide", (draw.normal(2, 150_000),))
    yield Case("one", (draw.normal(1, 1),))
    yield Case("empty", (draw.normal(0, 100),))


def _allocate_tokens(logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@custom_op(cases=_argmax_cases, errors=ErrorModel(exact=True), allocate=_allocate_tokens)
def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """logits [N, V] -> the likeliest token of each row, int64 [N]; the lowest index among equals."""
    return logits.argmax(dim=-1)


def _sample_cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str,
        logits: torch.Tensor,
        temperature: tuple[float, float] = (0.5, 1.5),
        top_k: int = 0,
        top_p: tuple[float, float] = (1.0, 1.0),
        min_p: tuple[float, float] = (0.0, 0.0),
    ) -> Case:
        n = logits.shape[0]

        def column(bounds: tuple[float, float]) -> torch.Tensor:
            return draw.floats(n) * (bounds[1] - bounds[0]) + bounds[0]

        limit = draw.integers(1, top_k + 1, n) if top_k else draw.integers(0, 1, n)
        args = (logits, column(temperature), limit.int(), column(top_p), column(min_p), draw.floats(n))
        settled = _settled(*args)
        return Case(name, tuple(arg[settled] for arg in args))

    yield case("plain", draw.normal(40, 300, scale=3.0))
    yield case("greedy", draw.normal(8, 300), temperature=(0.0, 0.0), top_k=5, top_p=(0.0, 0.5))
    yield case("top_k", draw.normal(40, 300, scale=3.0), top_k=20)
    yield case("top_p", draw.normal(40, 300, scale=3.0), top_p=(0.1, 0.95))
    yield case("min_p", draw.normal(40, 300, scale=3.0), min_p=(0.01, 0.5))
    yield case("all", draw.normal(40, 301, scale=3.0), top_k=100, top_p=(0.5, 0.99), min_p=(0.0, 0.05))
    yield case("wide", draw.normal(4, 32_000, scale=4.0), top_k=50, top_p=(0.5, 0.99))
    yield case("hot", draw.normal(20, 50), temperature=(50.0, 100.0))
    yield case("cold", draw.normal(20, 50), temperature=(0.001, 0.01))
    mixed = case("mixed", draw.normal(30, 300, scale=3.0), top_k=20, top_p=(0.5, 0.95))
    mixed.args[1][::2], mixed.args[2][::3] = 0.0, 1
    yield mixed
    yield case("one", draw.normal(1, 1))
    yield case("empty", draw.normal(0, 300))


def _settled(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    margin: float = 2e-5,
) -> torch.Tensor:
    """Rows whose token stays the same if a number moves by ``margin``: there, no order of summation may change it."""
    settled = torch.ones_like(uniform, dtype=torch.bool)
    first = sample_tokens.reference(logits, temperature, top_k, top_p, min_p, uniform)
    for sign in (-margin, margin):
        for p, m, u in (
            (top_p, min_p, (uniform + sign).clamp(0, 1 - margin / 2)),
            (torch.where(top_p < 1, top_p + sign, top_p), min_p, uniform),
            (top_p, min_p * (1 + sign), uniform),
        ):
            settled &= sample_tokens.reference(logits, temperature, top_k, p, m, u) == first
    return settled


@custom_op(cases=_sample_cases, errors=ErrorModel(exact=True), allocate=_allocate_tokens)
def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token for each row: logits [N, V] and settings [N] -> tokens int64 [N]. V is the vocabulary's size.

    In this order:

    * ``temperature`` (float32) divides the logits. At 0 the row is greedy: the highest logit, the lowest index among
      equals. The other settings have no effect then.
    * ``min_p`` (float32, 0: off) keeps tokens with at least ``min_p`` times the highest probability
      (arXiv:2407.01082).
    * ``top_k`` (int32, 0 or less: off) keeps tokens whose logit is at least the k-th highest.
    * ``top_p`` (float32, 1: off) renormalises. It keeps a token if all likelier tokens together have a probability
      below ``top_p`` (arXiv:1904.09751). The likeliest token is always kept.
    * The result is the first token, in vocabulary order, at which the cumulative probability exceeds ``uniform``
      (float32 in [0, 1)).

    Equal logits are kept or dropped together. Only rows with ``top_k`` or ``top_p`` sort the vocabulary. NaN logits
    give an arbitrary valid token.
    """
    greedy, vocabulary = temperature == 0, logits.shape[-1]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = wide / torch.where(greedy, 1.0, temperature)[:, None]
    scaled = _drop_below(scaled, scaled.amax(-1) + min_p.log())
    sorting = (((top_k > 0) & (top_k < vocabulary)) | (top_p < 1)) & ~greedy
    if sorting.any():
        rows = sorting.nonzero()[:, 0]
        scaled[rows] = _drop_below(scaled[rows], _threshold(scaled[rows], top_k[rows], top_p[rows]))
    cumulative = scaled.softmax(-1).cumsum(-1)
    total = cumulative[:, -1]
    # Rounding must not lift the target to the total: no token lies there.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=vocabulary - 1)
    return torch.where(greedy, wide.argmax(-1), drawn)


def row_by_row(logits: torch.Tensor, *settings: torch.Tensor) -> torch.Tensor:
    """``sample_tokens``, each row of logits [N, V] and of its five settings alone; see each_row.

    It stands there twice: a single row's cumulative sum may be split, on accelerators, in another way in each run.
    """
    rows = (tuple(torch.cat([x, x]) for x in row) for row in each_row(logits, *settings))
    return torch.cat([sample_tokens.reference(*twice)[:1] for twice in rows])


def _drop_below(logits: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < threshold[:, None], float("-inf"))


def _threshold(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The lowest logit [N] that top_k and then top_p keep."""
    vocabulary = logits.shape[-1]
    ordered = logits.sort(dim=-1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long()
    kth = ordered.gather(-1, k[:, None] - 1)
    probabilities = ordered.masked_fill(ordered < kth, float("-inf")).softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    size = (likelier < top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
    last = ordered.gather(-1, size - 1)
    return torch.where(top_p[:, None] < 1, torch.maximum(kth, last), kth)[:, 0]
