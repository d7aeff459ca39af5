"""A tokenizer of another model: a start says which of its ids the model lacks, or that no text can be encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from hardpoint import LLM, SamplingParams
from hardpoint.structured.bytes import BEGIN, NUM_BYTES, VOCABULARY, byte_tokenizer
from hardpoint_plugin_api import CheckpointError, RequestError
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm, until
from tests.support.serving import running_server

ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many tokens as its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama", vocab_size=VOCABULARY)
    return folder


@pytest.fixture(params=["thread", "process"])
def own_process(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "process")


def tokenizer_with(folder: Path, *added: str, around: str | None = None) -> str:
    """A tokenizer of bytes with tokens more, one of which may stand in front of every text; returns its folder."""
    tokenizer: Tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*added])
    if around is not None:
        special = [(around, tokenizer.token_to_id(around))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{around} $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_ids_that_the_model_lacks(
    model: Path, tmp_path: Path, own_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other = tokenizer_with(tmp_path, "ab", "cd", "ef")
    with small_llm(model, tokenizer=other, core_process=own_process) as llm:
        said = [record.getMessage() for record in caplog.records if "tokenizer" in record.getMessage()]
        assert said == [
            f"ids 258 to 260 of the tokenizer in {other} do not exist in the model, whose vocabulary has 258 tokens; "
            "requests that hold them are refused (--tokenizer names the tokenizer)"
        ]
        with pytest.raises(RequestError, match=r"token id 259 is outside the model's vocabulary of 258"):
            llm.generate("cd", ONE)
        assert len(llm.generate("dc", ONE)[0].outputs[0].token_ids) == 1


def test_one_id_that_the_model_lacks(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_llm(model, tokenizer=tokenizer_with(tmp_path, "ab")):
        assert "id 258 of the tokenizer" in caplog.text
        assert "does not exist" in caplog.text


@pytest.mark.parametrize("padding", [0, 6])
def test_a_padded_vocabulary_is_usual(tmp_path: Path, padding: int, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "llama", vocab_size=VOCABULARY + padding)
    with small_llm(tmp_path):
        assert "tokenizer" not in caplog.text


def test_no_text_can_be_encoded(tmp_path: Path, own_process: bool) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    other.mkdir()
    write_checkpoint(model, "llama", vocab_size=NUM_BYTES)
    with pytest.raises(CheckpointError, match=r"and id 256 is put around every text: no text can be encoded; name the"):
        small_llm(model, tokenizer=tokenizer_with(other, around=BEGIN), core_process=own_process)
    with LLM(str(model), platform="cpu", kv_cache_memory="16MiB", skip_tokenizer_init=True) as llm:
        assert len(llm.generate({"prompt_token_ids": [1]}, ONE)[0].outputs[0].token_ids) == 1


def test_a_server_of_several_processes_says_it_once(tmp_path: Path) -> None:
    other = tokenizer_with(tmp_path, *(f"[{number}]" for number in range(4_000)))
    with running_server("--tokenizer", other, "--api-server-count", "2") as server:

        def count() -> int:
            return sum("do not exist in the model" in line for line in server.log)

        until(lambda: count() > 0)  # the log is read by a thread, which may be behind
        assert count() == 1
