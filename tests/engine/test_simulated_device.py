"""Core on a device that is neither a CPU nor CUDA: the simulated accelerator of tests/simulated, in a child process.

Building it takes half a minute, once: see tests/support/simulated.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import simulated


@pytest.fixture(scope="session")
def site() -> Path:
    return simulated.installed()


def check(site: Path, scratch: Path, *arguments: str) -> None:
    done = simulated.run_tests(site, scratch, *arguments)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_device_and_its_kernels(site: Path, tmp_path: Path) -> None:
    check(site, tmp_path, "tests/simulated_device")


OF_THE_DEVICE = (
    "preempt or how_the_engine_is_set_up or step_that_fails or after_sleep or waking_up or other_weights "
    "or left_behind or memory_that_is_gone or lives_of_slots or edge_of_a_block or prefixes_chunks"
)
"""In names of tests: memory, copies, events and lengths of the device. Others hardly depend on it."""


@pytest.mark.parametrize("chosen", [OF_THE_DEVICE, pytest.param("", marks=pytest.mark.nightly)], ids=["part", "whole"])
def test_engines_run_on_it(site: Path, tmp_path: Path, chosen: str) -> None:
    latents = "tests/engine/test_latent_attention.py::test_prefixes_chunks_and_preemption"
    if chosen:
        latents += "[dense-True]"
    parts = ("generation", "sampler", "sleep", "states")
    check(site, tmp_path, "-k", chosen, latents, *(f"tests/engine/test_{part}.py" for part in parts))


def test_drafts_are_verified_on_it_before_they_are_known(site: Path, tmp_path: Path) -> None:
    check(site, tmp_path, "tests/engine/test_speculation.py", "-k", "reads")


@pytest.mark.nightly
def test_adapters_are_served_on_it(site: Path, tmp_path: Path) -> None:
    check(site, tmp_path, "tests/engine/test_lora.py", "-k", "replayed or ahead or sleep or quantized")


@pytest.mark.parametrize(
    "chosen",
    [
        "greedy and ahead and graphs",
        pytest.param("greedy", marks=pytest.mark.nightly),
    ],
    ids=["part", "whole"],
)
def test_no_step_waits_but_for_tokens(site: Path, tmp_path: Path, chosen: str) -> None:
    """Greedily: the reference that draws looks at the settings of requests, which are on the device."""
    check(site, tmp_path, "-m", "accelerator", "-k", chosen, "tests/engine/test_waiting.py")


def test_replays_are_compared_on_it(site: Path, tmp_path: Path) -> None:
    check(site, tmp_path, "-m", "accelerator", "tests/engine/test_replay_on_device.py")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "tests",
    ["engine/test_cache_groups.py", "engine/test_speculation.py", "engine/test_token_equality.py", "structured"],
)
def test_engines_run_on_it_however_they_schedule(site: Path, tmp_path: Path, tests: str) -> None:
    check(site, tmp_path, f"tests/{tests}")
