"""``bench startup``: whole starts, with the settings that it was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.bench.startup import startup
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import HardpointError
from tests.support.engines import SMALL


def test_stages_of_a_start_with_settings(tmp_path: Path) -> None:
    result = startup(EngineConfig.create(model="demo", **SMALL), repeat=1)
    values = {row.name: row.value for row in result.rows}
    assert next(iter(values)) == "interpreter"
    assert list(values)[-2:] == ["first token", "all"]
    assert values["all"] == pytest.approx(sum(value for name, value in values.items() if name != "all"))


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(HardpointError, match=r"the start to be measured failed:\n.*no_such_backend"):
        startup(EngineConfig.create(model="demo", **(SMALL | {"attention_backend": "no_such_backend"})), repeat=1)
