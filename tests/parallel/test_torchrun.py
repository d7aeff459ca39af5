"""Ranks that torchrun starts: one script in every process, which goes on with an engine in rank 0's alone."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_states import HYBRID
from tests.out_of_tree.build import install
from tests.support import two_hosts
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.expert_servers import MIXTURE

PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import EngineDeadError

folder, prompts, rank = Path(sys.argv[1]), json.loads(sys.argv[2]), os.environ["RANK"]
(folder / f"pid-{rank}").write_text(str(os.getpid()))
with LLM(
    str(folder), platform="cpu", kv_cache_memory="16MiB", executor="torchrun", **json.loads(sys.argv[4]),
    plugin_config={"cpu": {"threads": 1}},
) as llm:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    print(json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
    if end := {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(sys.argv[3]):
        other = int((folder / "pid-1").read_text())
        try:
            for count, _ in enumerate(llm.stream([1], endless)):
                if count == 3:
                    os.kill(other, end)
        except EngineDeadError as error:
            print(error, flush=True)
        if end == signal.SIGSTOP:
            os.kill(other, signal.SIGCONT)
print(f"the end of rank {rank}", flush=True)
if end:  # torchrun waits five minutes for a node that failed where another's script ends well
    sys.exit(1)
"""


def torchrun(
    folder: Path, prompts: list[list[int]], end: str, size: str = "tensor_parallel_size", site: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM. torchrun looks seldom enough after its processes for rank 0 to be the first that sees one die."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if end == "kill":
        launcher += ["--monitor-interval", "10"]
    return subprocess.run(
        [*launcher, str(script), str(folder), json.dumps(prompts), end, json.dumps({size: 2, "step_timeout": 5})],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | ({} if site is None else {"PYTHONPATH": str(site)}),
    )


def test_rank_0_drives(tmp_path: Path) -> None:
    model, prompts = write_checkpoint(tmp_path, "llama"), random_prompts(3, 30, seed=1)
    done = torchrun(tmp_path, prompts, "close")
    assert done.returncode == 0, done.stderr
    tokens, end = done.stdout.splitlines()
    assert end == "the end of rank 0", "the other process ended where its engine did"
    for prompt, found in zip(prompts, json.loads(tokens), strict=True):
        check_tokens_equal(model, prompt, found)


@pytest.mark.nightly
def test_stages_take_the_blocks_that_the_first_makes_as_large_as_states(tmp_path: Path) -> None:
    """The last one has a state alone, which no block is too small for."""
    for folder in ("site", "wheels"):
        (tmp_path / folder).mkdir()
    install([HYBRID], tmp_path / "site", tmp_path / "wheels")
    write_checkpoint(tmp_path, "llama", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=64)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["HybridForCausalLM"]}))
    done = torchrun(tmp_path, [[3, 4, 5]], "close", "pipeline_parallel_size", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[0])[0]) == 12


@pytest.mark.nightly
def test_a_process_that_is_killed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", max_position_embeddings=16384)
    done = torchrun(tmp_path, [[1]], "kill")
    _, error, end = done.stdout.splitlines()
    said = "has ended, or its host is gone: see torchrun's report, and its stderr"
    assert error.startswith(f"the process of rank 1 on {socket.gethostname()} {said}")
    assert end == "the end of rank 0"
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_process_that_hangs(size: str, tmp_path: Path) -> None:
    """Each tells what it does: also rank 0, a thread of the script's process."""
    write_checkpoint(tmp_path, "llama", max_position_embeddings=16384)
    done = torchrun(tmp_path, [[1]], "stop", size)
    _, error, end = done.stdout.splitlines()
    waits = r"rank 0 (waits in \w+, called in \w+ \(hardpoint/\S+:\d+\)|is in \w+ \(\S+:\d+\))"
    said = rf"a step did not end within 5 seconds \(--step-timeout\), so that every rank was ended: {waits}"
    assert re.match(rf"{said}; rank 1 on \S+ does not react; build a new engine", error), error
    assert end == "the end of rank 0"
    assert done.returncode == 1, "rank 1 ends, too, once it goes on"


RESTARTED = """
import json, os, signal, sys
from pathlib import Path
from hardpoint import LLM, SamplingParams

folder, prompt, size, killed = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
rank = os.environ["RANK"]
(folder / f"pid-{rank}").write_text(str(os.getpid()))
is_first = not (folder / "killed").exists()
with LLM(
    str(folder), platform="cpu", kv_cache_memory="16MiB", executor="torchrun", **size,
    plugin_config={"cpu": {"threads": 1}},
) as llm:
    endless = is_first and rank != killed
    params = SamplingParams(temperature=0, max_tokens=None if endless else 12, ignore_eos=True)
    for count, output in enumerate(llm.stream(prompt, params)):
        if count == 3 and is_first and rank == "0" != killed:
            (folder / "killed").touch()
            os.kill(int((folder / f"pid-{killed}").read_text()), signal.SIGKILL)
    if is_first:  # the others wait for steps
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps(output.outputs[0].token_ids), flush=True)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "killed"), [("c10d", 1), ("static", 1), ("c10d", 0)])
@pytest.mark.parametrize("shared", [False, True], ids=["tensors", "replicas that share experts"])
def test_all_nodes_start_again(shared: bool, backend: str, killed: int, tmp_path: Path) -> None:
    """Two launchers, each with a process. One process is killed; the other ends by that, and both start again, as their
    launchers were told. torchrun's store lives on."""
    family, size = ("qwen3_moe", {"data_parallel_size": 2}) if shared else ("llama", {"tensor_parallel_size": 2})
    changes = MIXTURE if shared else {}
    model = write_checkpoint(tmp_path, family, max_position_embeddings=16384, **changes)
    (prompt,), script = random_prompts(1, 30, seed=1), tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--max-restarts", "1", "--monitor-interval", "1"]
    meeting = {
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-id", "own", "--rdzv-endpoint", f"127.0.0.1:{port}"],
        "static": ["--master-addr", "127.0.0.1", "--master-port", port],
    }[backend]
    given = json.dumps({**size, "enable_expert_parallel": shared})
    command = [
        *launcher,
        *meeting,
        "--node-rank",
        "{}",
        str(script),
        str(tmp_path),
        json.dumps(prompt),
        given,
        str(killed),
    ]
    nodes = [
        subprocess.Popen(
            [part.format(node) if part == "{}" else part for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for node in (0, 1)
    ]
    try:
        told = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    assert [node.returncode for node in nodes] == [0, 0], "".join(stderr for _, stderr in told)
    outputs = [json.loads(line) for stdout, _ in told for line in stdout.splitlines()]
    assert len(outputs) == 1 + shared
    for tokens in outputs:
        check_tokens_equal(model, prompt, tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_hosts(size: str, end: str, tmp_path: Path) -> None:
    """A rank on each; that of the second is killed while the first gets tokens."""
    if not two_hosts.can_be_made():
        pytest.skip("this machine lets no user make network namespaces")
    model = write_checkpoint(tmp_path, "llama", max_position_embeddings=16384)
    prompts, script = random_prompts(3, 30, seed=1), tmp_path / "program.py"
    script.write_text(PROGRAM)
    given = [str(script), str(tmp_path), json.dumps(prompts), end, json.dumps({size: 2})]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "10", "--nproc-per-node", "1"]
    launcher += ["--nnodes", "2", "--master-addr", two_hosts.ADDRESSES[0], "--master-port", "29500", "--node-rank"]
    commands = [[*launcher, str(node), *given] for node in (0, 1)]
    first, second = two_hosts.run_on_two_hosts(commands, tmp_path, {"OMP_NUM_THREADS": "1"}, 240)
    tokens, *others = first.stdout.splitlines()
    for prompt, found in zip(prompts, json.loads(tokens), strict=True):
        check_tokens_equal(model, prompt, found)
    assert others[-1] == "the end of rank 0"
    if end == "close":
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    else:
        assert re.match(
            r"the process of rank 1 on \S+ has ended, or its host is gone: see torchrun's report", others[0]
        ), others
        assert (first.returncode, second.returncode) == (1, 1)
