"""Synthetic requests: how many tokens they have, by a stated distribution, and which."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from hardpoint_plugin_api import ConfigError

SAMPLE_TEXT = f"{string.ascii_letters} {string.digits} {string.punctuation} It was the best of times, it was the worst."
"""Text for random prompts, once a model's tokenizer has made ids of it: every tokenizer has ids for it."""

FORMS = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST], or mixed:N:N..."


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: uniform from ``low`` to ``high``, lognormal, or ``mixed`` ones in turn.

    A lognormal one has the median ``low``, the standard deviation ``sigma`` of its logarithm, and is cut off at
    ``high``. https://en.wikipedia.org/wiki/Log-normal_distribution
    """

    low: int
    high: int
    sigma: float | None = None
    mixed: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Read what ``flag`` was given, one of ``FORMS``.

        Without MOST, the longest is eight times the median. Raises ConfigError.
        """
        kind, *numbers = text.split(":")
        try:
            if kind == "uniform":
                low, high = map(int, numbers)
                lengths = cls(low, high)
            elif kind == "lognormal":
                median, sigma, *most = numbers
                (high,) = map(int, most or [str(8 * int(median))])
                lengths = cls(int(median), high, float(sigma))
            elif kind == "mixed":
                each = tuple(map(int, numbers))
                lengths = cls(min(each), max(each), mixed=each)
            else:
                lengths = cls(int(text), int(text))
        except ValueError:
            raise ConfigError(f"{flag} {text} is no distribution of lengths; give {FORMS}") from None
        if not 1 <= lengths.low <= lengths.high or not 0 <= (lengths.sigma or 0) < math.inf:
            raise ConfigError(
                f"{flag} {text} is out of range: lengths are from 1 on, LOW is at most HIGH, SIGMA is no less than 0"
            )
        return lengths

    def draw(self, count: int, generator: random.Random) -> list[int]:
        """Draw ``count`` lengths in tokens."""
        if self.mixed:
            return list(islice(cycle(self.mixed), count))
        if self.sigma is None:
            return [generator.randint(self.low, self.high) for _ in range(count)]
        logarithms = [generator.normalvariate(math.log(self.low), self.sigma) for _ in range(count)]
        longest = math.log(self.high)  # cut off here, as what a wide distribution draws may exceed any float
        return [max(1, round(math.exp(min(longest, logarithm)))) for logarithm in logarithms]


@dataclass(frozen=True)
class SyntheticRequest:
    """A prompt, and how many tokens are to follow it."""

    prompt: list[int]
    num_output_tokens: int


def synthetic_requests(
    count: int, inputs: Lengths, outputs: Lengths, alphabet: Sequence[int], seed: int
) -> list[SyntheticRequest]:
    """``count`` requests of tokens drawn evenly from ``alphabet``; the same ones for the same arguments."""
    generator = random.Random(seed)
    lengths = zip(inputs.draw(count, generator), outputs.draw(count, generator), strict=True)
    return [SyntheticRequest(generator.choices(alphabet, k=length), wanted) for length, wanted in lengths]
