"""``hardpoint bench quality`` and its goals: 8 bits within 0.5 % of the unquantized loss, groups of 4 within 3 %."""

from __future__ import annotations

from hardpoint.bench.quality import quality


def test_goals_on_a_part_of_the_text() -> None:
    settings = {"text": None, "dtype": "bfloat16", "platform": "cpu", "cache_dtypes": ("int8",)}
    rows = {r.name: r for r in quality("demo", ("int8", "int4"), tokens=1024, **settings).rows}  # type: ignore[arg-type]  # click's own options
    plain = rows["bfloat16"].value
    assert 2 < plain < 5
    assert abs(rows["int8"].value / plain - 1) < 0.005
    assert abs(rows["cache int8"].value / plain - 1) < 0.005
    assert abs(rows["int4"].value / plain - 1) < 0.03
    assert rows["int4"].peer == plain
