"""The settings that the CUDA plugin wishes for."""

from __future__ import annotations

import pytest

from hardpoint_cuda.platform import describe_arch
from hardpoint_cuda.plugin import hardpoint_configure


@pytest.mark.parametrize(("stages", "wanted"), [(1, [("max_num_batched_tokens", 8192)]), (2, [])])
def test_steps_are_large_where_there_is_one_stage(stages: int, wanted: list[tuple[str, int]]) -> None:
    changes = hardpoint_configure(config={"pipeline_parallel_size": stages}, device=describe_arch("H100", (9, 0)))
    assert [(change.key, change.value) for change in changes] == wanted
