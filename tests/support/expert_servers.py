"""Engines that share experts as those of several servers do, over a small mixture."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hardpoint import LLM
from tests.support.engines import small_llm

MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""The sizes of the mixture, for write_checkpoint."""


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def of_servers(**settings: Any) -> dict[str, Any]:
    """Settings of two servers of a replica each, on this host; ``settings`` add to them."""
    given = {"data_parallel_size": 2, "enable_expert_parallel": True, "data_parallel_address": "127.0.0.1"}
    return given | {"data_parallel_rpc_port": free_port(), **settings}


def servers(folder: Path, **settings: Any) -> list[LLM]:
    """Two engines of a replica each, as two servers have them."""
    given = of_servers(**settings)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda number: small_llm(folder, data_parallel_rank=number, **given), range(2)))
