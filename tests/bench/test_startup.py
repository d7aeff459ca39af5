"""``bench startup``: whole starts, with the settings that it was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint.bench.startup import _installed, startup
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import HardpointError
from tests.support.engines import SMALL


@pytest.mark.nightly
def test_stages_of_a_start_with_settings(tmp_path: Path) -> None:
    result = startup(EngineConfig.create(model="demo", **SMALL), repeat=1, distributions=5)
    values = {row.name: row.value for row in result.rows}
    *stages, whole, processor, usage, plugins = values
    assert (stages[0], stages[-1], whole) == ("interpreter", "first token", "all")
    assert values[whole] == pytest.approx(sum(values[stage] for stage in stages))
    assert (processor, usage, plugins) == ("all, processor time", "hardpoint --help", "hardpoint plugins list")
    assert all(value > 0 for value in values.values())


def test_child_processes_find_more_distributions() -> None:
    code = "from importlib.metadata import version; print(version('crowd-2'))"
    with _installed(3):
        assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"1.0\n"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False).returncode


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(HardpointError, match=r"the start to be measured failed:\n.*no_such_backend"):
        startup(EngineConfig.create(model="demo", **(SMALL | {"attention_backend": "no_such_backend"})), repeat=1)
