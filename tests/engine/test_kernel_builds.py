"""An engine whose best kernel must be built first starts with the next one, and goes over to it between steps."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.core import EngineCore
from hardpoint.reference.attention import ReferenceAttention
from tests.out_of_tree.build import Dist, importable, install
from tests.parallel.ranks import ranks_in_threads
from tests.support import built_library
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm, until

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "deny": ("attention.causal=cpu_native", "linear=cpu_native"),
    "custom_ops": ["none"],
}
"""Kernels of core's own layouts serve meanwhile."""

SUPPORT = Path(built_library.__file__).parent

MANIFEST = """schema = 1
api = "0.2"
[plugin]
name = "built"
[[contribution]]
family = "{family}"
{of}name = "built"
target = "hp_built.kernels:{kernel}"
priority = 1000
requires = [{requires}]
"""
CONTRIBUTIONS = {
    "attention": MANIFEST.format(
        family="attention", of='of = "causal"\n', kernel="BuiltAttention", requires='{ dtype = ["float32"] }'
    ),
    "linear": MANIFEST.format(family="linear", of="", kernel="BuiltLinear", requires='{ spec = ["float32/float32"] }'),
    "op": MANIFEST.format(
        family="op", of='of = "rms_norm"\nform = "factory"\n', kernel="BuiltNorm", requires='{ dtype = ["float32"] }'
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "llama")


@pytest.fixture
def builds(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the plugin's kernel, of the family that a test names, is built when it is told to go."""
    site, wheels, folder = tmp_path / "site", tmp_path / "wheels", tmp_path / "builds"
    for path in (site, wheels, folder):
        path.mkdir()
    files = {
        "__init__.py": "",
        "plugin.py": "",
        "kernels.py": (SUPPORT / "built_kernels.py").read_text(),
        "library.py": (SUPPORT / "built_library.py").read_text(),
        "hardpoint.toml": CONTRIBUTIONS[getattr(request, "param", "attention")],
    }
    dist = Dist(
        "built-hardpoint", {f"hp_built/{name}": text for name, text in files.items()}, {"built": "hp_built.plugin"}
    )
    install([dist], site, wheels)
    monkeypatch.setenv("HP_BUILD_FOLDER", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(site))
    with importable(site):
        yield folder


def go(folder: Path, source: str = built_library.SOURCE) -> None:
    (folder / "started").write_text(source)
    (folder / "started").rename(folder / "go")


def has_ended(llm: LLM) -> bool:
    assert isinstance(llm.client, EngineCore)
    return not llm.client._builds._thread.is_alive()


def child(llm: LLM) -> int:
    """The process that builds."""
    assert isinstance(llm.client, EngineCore)
    until(lambda: llm.client._builds._child is not None)  # type: ignore[attr-defined]  # as asserted
    assert llm.client._builds._child is not None
    return llm.client._builds._child.pid


def check(llm: LLM, model: PreTrainedModel) -> None:
    prompts = random_prompts(2, 20, seed=4)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def serves(llm: LLM) -> bool:
    return "built" in {row.chosen for row in llm.client.table.rows}  # type: ignore[attr-defined]


def calls(folder: Path) -> int:
    from hp_built.library import counted  # type: ignore[import-not-found]  # installed by the fixture

    return int(counted())


def in_this_process(folder: Path, **settings: Any) -> AbstractContextManager[LLM]:
    return small_llm(folder, **settings)


def of_two_ranks(folder: Path, **settings: Any) -> AbstractContextManager[LLM]:
    return ranks_in_threads(folder, 2, **settings)


@pytest.mark.parametrize(
    ("builds", "start"),
    [("attention", in_this_process), ("linear", in_this_process), ("attention", of_two_ranks)],
    indirect=["builds"],
    ids=["attention", "linear", "two ranks"],
)
def test_the_engine_goes_over_to_what_was_built(
    checkpoint: tuple[Path, PreTrainedModel],
    builds: Path,
    start: Callable[..., AbstractContextManager[LLM]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, model = checkpoint
    caplog.set_level(logging.INFO, "hardpoint")
    with start(folder, **PLAIN) as llm:
        check(llm, model)
        assert not serves(llm)
        reasons = {r.code for row in llm.table.rows for lost in row.rejected for r in lost.reasons}
        assert "building" in reasons
        running = llm.stream(
            random_prompts(1, 20, seed=5)[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        )
        for _ in range(3):
            next(running)
        go(builds)
        until(lambda: has_ended(llm))
        *_, last = running
        check_tokens_equal(model, random_prompts(1, 20, seed=5)[0], last.outputs[0].token_ids)
        check(llm, model)
        assert serves(llm)
        assert calls(builds) > 20
    said = caplog.text
    assert "building the counting library for" in said
    assert "the kernels that were built serve from now on" in said


def test_a_build_that_fails_is_one_warning(
    checkpoint: tuple[Path, PreTrainedModel], builds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = checkpoint
    with small_llm(folder, **PLAIN) as llm:
        go(builds, "int count() { return nonsense; }")
        until(lambda: has_ended(llm))
        check(llm, model)
        assert not serves(llm)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith("the counting library for attention causal: built of plugin built could not be built:")
    assert "nonsense" in said


def test_a_build_that_is_killed_is_one_warning(
    checkpoint: tuple[Path, PreTrainedModel], builds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = checkpoint
    with small_llm(folder, **PLAIN) as llm:
        os.kill(child(llm), signal.SIGKILL)
        until(lambda: has_ended(llm))
        check(llm, model)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the build was ended by signal 9" in said


def test_closing_ends_a_build(checkpoint: tuple[Path, PreTrainedModel], builds: Path) -> None:
    with small_llm(checkpoint[0], **PLAIN) as llm:
        number = child(llm)
        os.kill(number, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert "hardpoint-kernel-builds" not in {thread.name for thread in threading.enumerate()}


def test_an_engine_may_wait(checkpoint: tuple[Path, PreTrainedModel], builds: Path) -> None:
    folder, model = checkpoint
    go(builds)
    with small_llm(folder, wait_for_kernels=True, **PLAIN) as llm:
        assert serves(llm)
        check(llm, model)


def test_a_kernel_that_is_asked_for_is_waited_for(checkpoint: tuple[Path, PreTrainedModel], builds: Path) -> None:
    go(builds)
    with small_llm(checkpoint[0], attention_backend="built", **PLAIN) as llm:
        assert serves(llm)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_backend_that_plans_by_exact_lengths_takes_over_where_no_drafts_are_verified(
    checkpoint: tuple[Path, PreTrainedModel], builds: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """The one that serves meanwhile takes bounds, as Triton's does; the one that is built does not, as FlashInfer's."""
    monkeypatch.setattr(ReferenceAttention, "exact_lengths", False)
    from hp_built import kernels  # type: ignore[import-not-found]  # installed by the fixture

    monkeypatch.setattr(kernels.BuiltAttention, "exact_lengths", True)
    folder, model = checkpoint
    drafts: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else {}
    settings = PLAIN | drafts | {"deny": (*PLAIN["deny"], "attention.causal=cpu_paged")}
    with small_llm(folder, **settings) as llm:
        assert "reference" in {row.chosen for row in llm.table.rows if row.family == "attention"}
        go(builds)
        until(lambda: has_ended(llm))
        check(llm, model)
        assert serves(llm) == (num_drafts == 0)


@pytest.mark.parametrize("builds", ["linear"], indirect=True)
def test_weights_in_another_layout_wait_for_the_next_start(
    checkpoint: tuple[Path, PreTrainedModel], builds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = checkpoint
    with small_llm(folder, dtype="float32") as llm:
        check(llm, model)
        go(builds)
        until(lambda: has_ended(llm))
        check(llm, model)
        assert not serves(llm)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith(
        "kernels were built that serve from the next start on: SwitchError: linear: built has its weight"
    )
    with small_llm(folder, dtype="float32") as llm:
        check(llm, model)
        assert serves(llm)


@pytest.mark.parametrize("builds", ["op"], indirect=True)
def test_ops_wait_for_the_next_start(
    checkpoint: tuple[Path, PreTrainedModel], builds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = checkpoint
    settings = PLAIN | {"custom_ops": ["all"]}
    caplog.set_level(logging.INFO, "hardpoint")
    with small_llm(folder, **settings) as llm:
        go(builds)
        until(lambda: has_ended(llm))
        check(llm, model)
        assert not serves(llm)
    assert "op rms_norm: built of plugin built serves from the next start on" in caplog.text
    with small_llm(folder, **settings) as llm:
        check(llm, model)
        assert serves(llm)


def test_an_idle_core_in_another_process_goes_over(
    checkpoint: tuple[Path, PreTrainedModel], builds: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The build's end wakes it: no request has to come by."""
    folder, model = checkpoint
    caplog.set_level(logging.INFO, "hardpoint")
    with small_llm(folder, core_process=True, **PLAIN) as llm:
        go(builds)
        until(lambda: "the kernels that were built serve from now on" in caplog.text)
        check(llm, model)
