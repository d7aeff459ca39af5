"""Ranks in actors of a Ray cluster: two nodes on this host, which are killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.engine.execution.ranks.ray_executor import Spot, places_of
from hardpoint.engine.remote.sharing_replicas import SharingReplicas
from hardpoint_plugin_api import ConfigError, EngineDeadError, EngineError
from tests.support.checkpoints import DEEPSEEK_V2, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import SMALL, until
from tests.support.expert_servers import MIXTURE, servers

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LATENT = DEEPSEEK_V2 | {"num_hidden_layers": 4}
needs_ray = pytest.mark.nightly


@pytest.mark.parametrize(
    ("nodes", "own", "wanted"),
    [
        ("aa", False, [(0, 0, 2, True), (1, 1, 2, True)]),
        ("aba", False, [(0, 0, 2, False), (2, 1, 2, False), (1, 0, 1, False)]),
        ("aba", True, [(0, 0, 1, False), (2, 0, 1, False), (1, 0, 1, False)]),
    ],
    ids=["one host", "two hosts", "devices of their own"],
)
def test_ranks_of_a_host_have_successive_numbers(
    nodes: str, own: bool, wanted: list[tuple[int, int, int, bool]], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=3)
    blueprint = draw(EngineConfig.create(model=str(tmp_path), **SMALL, pipeline_parallel_size=len(nodes)))
    places = places_of(blueprint, [Spot(node, own) for node in nodes])
    found = [(index, place.local_rank, place.local_ranks, place.on_one_host) for index, place in places]
    assert found == wanted
    assert [place.rank for _, place in places] == list(range(len(nodes)))


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, "qwen3")
    monkeypatch.setattr("hardpoint.extras._is_there", lambda module: False)
    with pytest.raises(ConfigError, match=r"--executor ray needs ray, not installed here: pip install"):
        LLM(str(tmp_path), **SMALL, tensor_parallel_size=2, executor="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with two processors each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    found.second = found.add_node(num_cpus=2)
    ray.init(address=found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def on_ray(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **(SMALL | settings), executor="ray")


@needs_ray
@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("qwen3", {}, {"tensor_parallel_size": 2}),
        ("qwen3", {"num_hidden_layers": 4}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("qwen3_moe", MIXTURE, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("qwen3", {"num_hidden_layers": 4}, {"pipeline_parallel_size": 3}),
        ("qwen3_moe", MIXTURE, {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
        ("deepseek_v2", LATENT, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen3", {}, {"data_parallel_size": 2}),
        ("qwen3_moe", MIXTURE, {"data_parallel_size": 2, "enable_expert_parallel": True}),
        ("qwen3_moe", MIXTURE, {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
    ids=["tp2", "tp2-pp2", "ep2", "pp3-uneven", "ep4", "latent-tp2-pp2", "dp2", "dp2-ep2", "dp2-tp2-ep4"],
)
def test_tokens_are_those_of_one_rank(
    cluster: Any,
    family: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four ranks are on two nodes. Replicas have cores in processes of their own, each of which is a driver."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model, prompts = write_checkpoint(tmp_path, family, **changes), random_prompts(4, 30, seed=2)
    with on_ray(tmp_path, **settings) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@needs_ray
def test_a_core_in_another_process_has_the_ranks(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = write_checkpoint(tmp_path, "qwen3"), random_prompts(1, 30, seed=3)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with on_ray(tmp_path, tensor_parallel_size=2, core_process=True) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@needs_ray
def test_the_example_of_batch_inference() -> None:
    pytest.importorskip("pyarrow")
    example = Path(__file__).parents[2] / "examples" / "ray_data.py"
    own = os.environ | {"RAY_ADDRESS": "local"}  # beside the tests' cluster
    command = [sys.executable, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=own)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 16


DEPLOYED = """
import json, sys, urllib.error, urllib.request
import ray
from ray import serve

ray.init(address="local", num_cpus=2)
import ray_serve

serve.start(http_options={"port": int(sys.argv[1])})
serve.run(ray_serve.app)
for body in ({"prompt": "It is a truth", "max_tokens": 8}, {"text": "It is a truth"}):
    asked = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            print(answer.status, json.dumps(answer.read().decode()), flush=True)
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), flush=True)
serve.shutdown()
"""


@needs_ray
def test_the_example_of_a_deployment() -> None:
    """Its text is that of an engine without Ray."""
    pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "examples"), "RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", DEPLOYED, str(port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=own)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line[:3] in ("200", "400")]
    with LLM("demo", platform="cpu") as llm:
        (output,) = llm.generate(["It is a truth"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert answers == [
        f"200 {json.dumps(output.outputs[0].text)}",
        '400 {"error":"the body needs a text \\"prompt\\""}',
    ]


def actors() -> list[int]:
    """The processes of ranks."""
    names = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/comm")}
    return sorted(pid for pid, name in names.items() if name.startswith("ray::RankActor"))


@needs_ray
def test_replicas_that_share_experts_are_built_again(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model, prompts = write_checkpoint(tmp_path, "qwen3_moe", **MIXTURE), random_prompts(3, 30, seed=2)
    settings: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "on_engine_failure": "restart"}
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with on_ray(tmp_path, **settings) as llm:
        before = actors()
        assert len(before) == 2
        streams = [llm.stream(prompt, long) for prompt in prompts]
        for stream in streams:
            next(stream)
        os.kill(before[1], signal.SIGKILL)
        for prompt, stream in zip(prompts, streams, strict=True):
            check_tokens_equal(model, prompt, list(stream)[-1].outputs[0].token_ids)
        assert len(actors()) == 2
        assert not set(actors()) & set(before)


@needs_ray
@pytest.mark.parametrize("killed", ["core", "actor"])
def test_two_servers_share_experts_and_are_built_again(
    killed: str, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model, prompts = write_checkpoint(tmp_path, "qwen3_moe", **MIXTURE), random_prompts(2, 30, seed=2)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llms = servers(tmp_path, executor="ray", on_engine_failure="restart")
    before = actors()
    assert len(before) == 2
    streams = [llm.stream(prompt, long) for llm, prompt in zip(llms, prompts, strict=True)]
    for stream in streams:
        next(stream)
    client = llms[1].client
    assert isinstance(client, SharingReplicas)
    os.kill(client._cores[0].facts.pid if killed == "core" else before[0], signal.SIGKILL)
    with ThreadPoolExecutor(2) as pool:
        for prompt, outputs in zip(prompts, pool.map(lambda stream: list(stream), streams), strict=True):
            check_tokens_equal(model, prompt, outputs[-1].outputs[0].token_ids)
    until(lambda: len(actors()) == 2 and not set(actors()) & set(before))
    for llm in llms:
        llm.close()
    until(lambda: not actors())


@needs_ray
def test_more_ranks_than_there_is_room_for(cluster: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=5)
    with pytest.raises(EngineError, match=r"no room for 5 ranks of {'CPU': 1.0} each within 5 seconds; free are"):
        on_ray(tmp_path, pipeline_parallel_size=5, core_start_timeout=5)


@needs_ray
def test_a_node_that_is_killed_and_replaced(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes on once the cluster has room for all ranks again."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model, (prompt,) = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=4), random_prompts(1, 30, seed=2)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with on_ray(tmp_path, pipeline_parallel_size=4, on_engine_failure="restart") as llm:  # two ranks on each node
        stream = llm.stream(prompt, long)
        next(stream)
        cluster.remove_node(cluster.second, False)
        cluster.second = cluster.add_node(num_cpus=2)
        check_tokens_equal(model, prompt, list(stream)[-1].outputs[0].token_ids)
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@needs_ray
def test_a_node_that_is_killed_ends_the_engine(cluster: Any, tmp_path: Path) -> None:
    """The last test, since a node is gone."""
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=4)
    with on_ray(tmp_path, pipeline_parallel_size=4) as llm:  # two ranks on each node
        stream = llm.stream([1], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        next(stream)
        threading.Thread(target=cluster.remove_node, args=(cluster.second, False)).start()
        with pytest.raises(EngineDeadError, match=r"the Ray actor of rank \d is gone: "):
            for _ in stream:
                pass
