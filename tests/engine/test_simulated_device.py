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


PARTS = ("generation", "sampler", "sleep", "states")
OF_THE_DEVICE = (
    "(do_not_depend and (async_scheduling or eager or block_size)) or preempt or step_that_fails or after_sleep "
    "or waking_up or other_weights or left_behind or memory_that_is_gone or lives_of_slots or edge_of_a_block "
    "or prefixes_chunks"
)
"""In names of tests: memory, copies, events and lengths of the device. Others hardly depend on it."""


def test_the_device_and_engines_on_it(site: Path, tmp_path: Path) -> None:
    """Its own tests, and of the engine's ``OF_THE_DEVICE``, speculation with drafts that are verified before they are
    known, and greedy steps ahead, which wait for nothing but tokens and whose replays are compared. (Of drawn ones the
    reference looks at the settings of requests, which are on the device.)

    One child process: each imports Transformers' models and torch's compiler for some seconds.
    """
    latents = "tests/engine/test_latent_attention.py::test_prefixes_chunks_and_preemption[dense-True]"
    files = (f"tests/engine/test_{part}.py" for part in (*PARTS, "speculation", "waiting", "replay_on_device"))
    chosen = (
        f"simulated_device or test_replay_on_device or (test_waiting and greedy and ahead and graphs) "
        f"or (test_speculation and reads) or (({OF_THE_DEVICE}) and not test_speculation and not test_waiting)"
    )
    check(site, tmp_path, "-m", "not nightly", "-k", chosen, "tests/simulated_device", latents, *files)


@pytest.mark.nightly
def test_whole_engines_run_on_it(site: Path, tmp_path: Path) -> None:
    latents = "tests/engine/test_latent_attention.py::test_prefixes_chunks_and_preemption"
    check(site, tmp_path, latents, *(f"tests/engine/test_{part}.py" for part in PARTS))


@pytest.mark.nightly
def test_adapters_are_served_on_it(site: Path, tmp_path: Path) -> None:
    check(site, tmp_path, "tests/engine/test_lora.py", "-k", "replayed or ahead or sleep or quantized")


@pytest.mark.nightly
def test_no_greedy_step_waits_but_for_tokens(site: Path, tmp_path: Path) -> None:
    check(site, tmp_path, "-m", "accelerator", "-k", "greedy", "tests/engine/test_waiting.py")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "tests",
    ["engine/test_cache_groups.py", "engine/test_speculation.py", "engine/test_token_equality.py", "structured"],
)
def test_engines_run_on_it_however_they_schedule(site: Path, tmp_path: Path, tests: str) -> None:
    check(site, tmp_path, f"tests/{tests}")
