"""The engine in this process: what is refused because the numbers would be false, and what the roofline counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.bench.lengths import SyntheticRequest
from hardpoint.bench.offline import bytes_read, generate
from hardpoint.cli.main import run
from hardpoint.layers.moe import MoE
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm
from tests.support.serving import SMALL


@pytest.mark.parametrize("name", ["throughput", "latency"])
def test_outputs_that_would_end_early(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-model-len", "64", "--input-len", "40", "--output-len", "30"]
    assert run(["bench", name, *SMALL, *flags]) == 2
    said = capsys.readouterr().err
    assert "--input-len and --output-len make a sequence of 70 tokens, and the engine ends one at 64" in said
    assert "--max-model-len" in said


def test_outputs_that_just_fit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    with small_llm(tmp_path, max_model_len=64) as llm:
        assert generate(llm, [SyntheticRequest([5] * 40, 24), SyntheticRequest([6] * 20, 3)]) > 0
        assert generate(llm, []) >= 0, "a warm-up of none"


def test_a_batch_of_more_than_run_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "latency", *SMALL, "--batch-size", "17"]) == 2
    assert "--batch-size 17: at most 16 sequences run at once; raise --max-num-seqs to 17" in capsys.readouterr().err


def test_an_embedding_is_read_where_it_is_the_head(tmp_path: Path) -> None:
    """An untied one is a second weight as large as the head, and no step reads all of it."""
    read, held = {}, {}
    for tied in (True, False):
        folder = tmp_path / str(tied)
        write_checkpoint(folder, "qwen3", tie_word_embeddings=tied)
        with small_llm(folder, dtype="float32") as llm:
            read[tied], held[tied] = bytes_read(llm, 1), llm.memory_report().by_tag["weights"]
    vocabulary, hidden = 258, 64
    assert held[False] - read[False] == vocabulary * hidden * 4
    assert held[True] == read[True]
    assert read[False] == pytest.approx(read[True], rel=0.01), "but for how a head is packed"


def test_few_tokens_read_few_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    with small_llm(tmp_path, dtype="float32") as llm:
        read = [bytes_read(llm, tokens) for tokens in (1, 2, 1000)]
        held = llm.memory_report().by_tag["weights"]
        layers = [layer for layer in llm.core.blueprint.model.modules() if isinstance(layer, MoE)]
        experts = sum(weight.nbytes for layer in layers for weight in layer.experts.weights.values())
        embedding = sum(weight.nbytes for weight in llm.core.blueprint.model.embedding.weights.values())
        router = layers[0].args.router
    assert 0 < router.top_k < router.num_experts
    assert read[2] == pytest.approx(held - embedding, rel=1e-6)
    assert read[0] == pytest.approx(held - embedding - experts * (1 - router.top_k / router.num_experts), rel=1e-6)
    assert read[0] < read[1] < read[2]
