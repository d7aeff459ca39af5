"""Lengths of synthetic requests."""

from __future__ import annotations

import random

from hardpoint.bench.lengths import Lengths


def test_a_distribution_wider_than_any_float_is_cut_off() -> None:
    lengths = Lengths.parse("lognormal:128:1000:2000", "--input-len")
    assert set(lengths.draw(50, random.Random(0))) == {1, 2000}
