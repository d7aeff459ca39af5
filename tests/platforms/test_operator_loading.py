"""Operators' code is loaded in a thread, which ends before anything is captured."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from hardpoint.platforms.operator_loading import OperatorLoading
from hardpoint.platforms.stream_graphs import CaptureStream


def test_all_operators_are_called(caplog: pytest.LogCaptureFixture) -> None:
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.DEBUG, "hardpoint.platforms.operator_loading"):
        OperatorLoading(torch.device("cpu")).wait()
    assert not caplog.records
    assert torch.equal(torch.random.get_rng_state(), state), "weights and samples would be drawn otherwise"


def test_a_device_that_fails_is_left_to_the_first_calls(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "hardpoint.platforms.operator_loading"):
        OperatorLoading(torch.device("meta")).wait()
    assert "operators are loaded at their first calls" in caplog.text


def test_no_stream_is_captured_on_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def load(device: torch.device) -> None:
        may_end.wait(10)
        ended.set()

    monkeypatch.setattr("hardpoint.platforms.operator_loading._load", load)
    stream = CaptureStream(
        torch.device("cpu"), SimpleNamespace(Stream=lambda device: ended.is_set()), OperatorLoading(torch.device("cpu"))
    )
    threading.Timer(0.05, may_end.set).start()
    assert stream.get(), "the stream was taken while operators were loaded"
