"""Ranks that would choose unlike each other, that cannot be, or of which one fails: one clear error each."""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from hardpoint import LLM
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import Blueprint, _check_devices, draw
from hardpoint.engine.execution.ranks.launch import Launch
from hardpoint.engine.execution.ranks.rank_process import Rank, RankFailed, RankSpec
from hardpoint.engine.execution.ranks.ranks_executor import RanksExecutor
from hardpoint.engine.execution.ranks.torchrun_executor import ThreadRank
from hardpoint.engine.execution.runner import Runner
from hardpoint.engine.processes.calls import Failure
from hardpoint.parallel.choices import Choices
from hardpoint.parallel.groups import Group
from hardpoint.parallel.topology import Coordinates
from hardpoint.resources import EngineResources
from hardpoint_plugin_api import CapacityError, ConfigError, EngineDeadError, HardpointError
from tests.parallel.ranks import ThreadsExecutor, ranks_in_threads, start_threads
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import SMALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "qwen3")
    return path


def config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.create(model=str(folder), **(SMALL | {"tensor_parallel_size": 2} | settings))


def start(configs: list[EngineConfig], choices: Choices | None) -> RanksExecutor:
    """Ranks that were given a config each."""
    specs = [RankSpec(each, each.topology.on_this_host(rank), choices) for rank, each in enumerate(configs)]
    return RanksExecutor(configs[0], start_threads(specs))


def test_a_rank_that_would_choose_otherwise(folder: Path) -> None:
    alike, unlike = config(folder), config(folder, attention_backend="reference")
    with pytest.raises(HardpointError) as caught:
        start([alike, unlike], Choices.of(draw(alike)))
    said = str(caught.value)
    assert said.startswith("rank 1 does not agree with the engine's own process; every rank must have the same plugins")
    differing = [line for line in said.splitlines() if " only: " in line]
    assert len(differing) == 2, "what is alike is not shown"
    assert any("rank 1 only: attention" in line and "reference" in line for line in differing)


def test_ranks_that_were_given_unlike_settings(folder: Path) -> None:
    """As under torchrun, where every process reads its own."""
    with pytest.raises(
        ConfigError, match=r"rank 1 was given other settings than rank 0.*: max_num_seqs = 8, on rank 0 16"
    ):
        start([config(folder), config(folder, max_num_seqs=8)], None)
    with pytest.raises(ConfigError, match=r"block_size = 32, on rank 0 not given"):
        start([config(folder), config(folder, block_size=32)], None)


def test_nothing_is_joined_before_all_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joining: list[str] = []
    monkeypatch.setattr(Group, "open", lambda group, store: joining.append(group.name))
    with pytest.raises(HardpointError, match="does not agree"):
        start([config(folder), config(folder, dtype="bfloat16")], Choices.of(draw(config(folder))))
    assert not joining


def test_choices_travel_and_compare(folder: Path) -> None:
    """They are the same on every rank, though each rank has its own slices."""
    with ranks_in_threads(folder, 4) as llm:
        executor = llm.core.executor
        assert isinstance(executor, ThreadsExecutor)
        everyone = [Choices.of(blueprint) for blueprint in executor.blueprints]
    assert len(set(everyone)) == 1
    assert pickle.loads(pickle.dumps(everyone[0])) == everyone[0]
    assert everyone[0].digest == llm.table.digest
    assert everyone[0].plugins[0][0] == "core"


def test_an_end_stays_open_while_its_rank_may_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may still have to say why it failed when the engine has hung up."""
    hung_up = threading.Event()
    open_then: list[bool] = []

    def fail_late(rank: Rank, meet: Any, send: Any) -> None:
        assert hung_up.wait(10)
        time.sleep(0.05)  # long enough for the listener to see the end
        open_then.append(not link._theirs.closed)
        send(RankFailed(Failure.of(ValueError("late"))))

    monkeypatch.setattr(Rank, "run", fail_late)
    link = ThreadRank(RankSpec(config(folder), Coordinates()), HashStore())
    link.close()
    hung_up.set()
    link.join(10)
    until = time.monotonic() + 10
    while not link._theirs.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert link._theirs.closed
    assert open_then == [True]


def test_a_rank_that_fails_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error comes as it is; that the others could not go on says less."""
    real = Runner.__init__

    def fail_on_rank_1(runner: Runner, args: Any) -> None:
        if args.ctx.parallel.tp.rank == 1:
            raise ConfigError("rank 1 cannot")
        real(runner, args)

    monkeypatch.setattr(Runner, "__init__", fail_on_rank_1)
    with pytest.raises(ConfigError, match=r"^rank 1 cannot$"), ranks_in_threads(folder, 2):
        pass


def test_a_rank_that_fails_in_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runner.submit

    def fail_on_rank_1(runner: Runner, step: Any) -> Any:
        if runner._ctx.parallel.tp.rank == 1 and step.number == 2:
            raise ValueError("the kernel broke")
        return real(runner, step)

    monkeypatch.setattr(Runner, "submit", fail_on_rank_1)
    with ranks_in_threads(folder, 2) as llm:
        said = "rank 1 failed, and every rank was ended: ValueError: the kernel broke"
        with pytest.raises(EngineDeadError, match=said):
            llm.generate([[1], [2]], use_tqdm=False)
        with pytest.raises(EngineDeadError, match=said):
            llm.generate([[1]])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensor_parallel_size": 3}, "number of attention heads of 4 does not divide among 3 ranks; take one of 1, 2"),
        (
            {"tensor_parallel_size": 2, "executor": "inproc"},
            "inproc' runs one rank.*use --executor mp, ray or torchrun",
        ),
        ({"tensor_parallel_size": 4, "expert_parallel_size": 3}, "expert_parallel_size.* must divide the number of"),
        (
            {"expert_parallel_size": 1, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            "contradicts --enable",
        ),
        (
            {"executor": "torchrun", "tensor_parallel_size": 2},
            "torchrun did not start this process.*--nproc-per-node 2",
        ),
        ({"executor": "torchrun", "core_process": True}, "core_process.*contradicts --executor torchrun"),
        ({"tensor_parallel_size": 2, "communicator": "nccl"}, "nccl.*gather_and_sum, torch_distributed"),
        ({"tensor_parallel_size": 2, "communicator": "gather_and_sum", "dtype": "float64"}, "dtype"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(HardpointError, match=said):
        LLM(str(folder), **(SMALL | settings))


def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "heads", "llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    with pytest.raises(ConfigError, match="3 KV heads do not divide among as many ranks, nor do the ranks divide"):
        draw(config(tmp_path / "heads"))
    write_checkpoint(tmp_path / "width", "llama", intermediate_size=97)
    with pytest.raises(ConfigError, match=r"intermediate size of 97 does not divide among 2 ranks; take one of 1$"):
        draw(config(tmp_path / "width"))


def test_more_ranks_than_devices(folder: Path) -> None:
    info = SimpleNamespace(accelerator=True, count=2, name="Acme 1")
    platform = cast(Any, SimpleNamespace(name="acme", info=info))
    _check_devices(config(folder), platform)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 4: every rank needs .* acme has 2 here \(Acme 1\)"):
        _check_devices(config(folder, tensor_parallel_size=4), platform)
    with pytest.raises(ConfigError, match="acme has 1 here from device 1 on"):
        _check_devices(config(folder, device_index=1), platform)


def test_memory_of_collectives_comes_first_and_stays() -> None:
    resources, device = EngineResources(), torch.device("cpu")
    resources.declare("mine", 8)
    resources.declare("shared", 8, scope="collective")
    resources.allocate_collective(device)
    address = resources.get("shared").data_ptr()
    with pytest.raises(CapacityError, match="declared after the groups of ranks were joined"):
        resources.declare("late", 8, scope="collective")
    with pytest.raises(CapacityError, match="not allocated"):
        resources.get("mine")
    resources.declare("others", 8)
    resources.allocate(device)
    resources.drop()
    assert resources.get("shared").data_ptr() == address
    with pytest.raises(CapacityError, match="asleep"):
        resources.get("mine")
    resources.restore()
    assert resources.get("mine").numel() == resources.get("others").numel() == 8


def test_a_launch_of_another_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host"}
    launched["MASTER_PORT"] = "29500"
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun started 4 processes; one is needed for each rank"):
        Launch.read(config(folder))
    four = config(folder, tensor_parallel_size=4)
    assert Launch.read(four).place == Coordinates(four.topology, 0, 0, local_ranks=2, on_one_host=False)


def test_explain_leaves_the_device_alone(folder: Path) -> None:
    """Drawing for several ranks touches no device, and shows what rank 0 will see."""
    blueprint: Blueprint = draw(config(folder, tensor_parallel_size=4))
    assert blueprint.ctx.torch_device.type == "meta"
    assert [row.workload for row in blueprint.table.rows if row.family == "communicator"]
    assert replace(blueprint, config=config(folder)).ctx.parallel.tp.size == 4
