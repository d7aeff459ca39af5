"""``bench engine``: every step that is measured has work."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from hardpoint.bench import engine as module
from hardpoint.checkpoint.source import demo_model
from hardpoint.cli import bench
from hardpoint.cli.main import run
from hardpoint.engine.core import EngineCore
from hardpoint.engine.scheduling.request import Request
from hardpoint.tokenizer import Tokenizer


def test_no_measured_step_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that sequences of 1024 tokens have no room for."""
    idle, step = list[bool](), EngineCore.step

    def watched(core: EngineCore) -> list[Request]:
        idle.append(core.is_idle)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", watched)
    assert module._milliseconds(1, 0, 1100) > 0
    assert len(idle) > 1100
    assert not any(idle)


def test_more_steps_than_a_sequence_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "engine", "--dry-device", "--steps", "2001"]) == 2
    assert "2001 is not in the range 2<=x<=2000" in capsys.readouterr().err


def test_the_most_steps_fit() -> None:
    assert module._milliseconds(1, 0, module._MOST_STEPS) > 0


def test_files_are_written_before_anything_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the table may close the pipe behind its first line."""

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(bench, "print_table", fail)
    file, plot = tmp_path / "result.json", tmp_path / "plot.png"
    flags = ["--running", "1", "--waiting", "0", "--steps", "2", "--json", str(file), "--plot", str(plot)]
    with pytest.raises(BlockingIOError):
        run(["bench", "engine", "--dry-device", *flags])
    assert json.loads(file.read_text())["name"] == "engine"
    assert plot.exists()


def test_a_token_of_a_long_stream_takes_no_more_memory_than_one_of_a_short_one() -> None:
    """A copy of all tokens so far would take 128 KiB or more at the end."""
    stream = module._Stream(Tokenizer.load(demo_model()))

    def most_bytes_of_a_token() -> int:
        most = 0
        tracemalloc.start()
        for _ in range(50):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            stream.seconds(1)
            most = max(most, tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
        return most

    stream.seconds(50)
    early = most_bytes_of_a_token()
    stream.seconds(module._LONG_STREAM - 200)
    assert 0 < most_bytes_of_a_token() < early + 40_000, "the list of token ids itself may grow by an eighth"
