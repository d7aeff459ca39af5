"""The eager graph engine against the contract of graph engines."""

from __future__ import annotations

import pytest
import torch

from hardpoint_plugin_api import EagerGraphEngine, GraphEngine
from tests.support.graph_contract import GraphEngineContract


class TestEager(GraphEngineContract):
    """On the host."""

    @pytest.fixture
    def graphs(self) -> GraphEngine:
        return EagerGraphEngine()

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")
