"""``hardpoint calibrate``: scales as Transformers' own keys and values have them, in a checkpoint that engines read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hardpoint.cli.main import run
from hardpoint_plugin_api import AttentionBackend
from tests.checkpoint.test_mistral_files import write_consolidated
from tests.quantization.formats import FORMATS
from tests.quantization.writing import write_quantized
from tests.support.checkpoints import random_prompts, reference_logits, write_checkpoint, write_tokenizer
from tests.support.engines import prompt_logits, small_llm

TEXT = "The whale, my dear Watson, is a truth universally acknowledged."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A checkpoint that is not quantized, with a text beside it."""
    folder = tmp_path_factory.mktemp("calibrate") / "model"
    model = write_checkpoint(folder, "qwen3", head_dim=32)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder, model


def calibrated(folder: Path, out: Path, *flags: str) -> int:
    """The exit code of the command."""
    data = ["--data", str(folder.parent / "text.txt"), "--output", str(out)]
    return run(["calibrate", str(folder), *data, "--platform", "cpu", "--dtype", "float32", *flags])


@pytest.mark.parametrize(("element", "top"), [("fp8", 448.0), ("int8", 127.0)])
def test_scales_of_the_largest_keys_and_values(
    plain: tuple[Path, PreTrainedModel], tmp_path: Path, element: str, top: float
) -> None:
    folder, model = plain
    out = tmp_path / "out"
    assert calibrated(folder, out, "--kv-cache-dtype", element) == 0
    scales = load_file(out / "model-kv-scales.safetensors")
    with small_llm(folder) as llm:
        ids = llm.tokenizer.encode(TEXT)
    with torch.inference_mode():
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    for number, layer in enumerate(cache.layers):
        for part, held in (("k", layer.keys), ("v", layer.values)):
            found = scales.pop(f"model.layers.{number}.self_attn.{part}_scale")
            torch.testing.assert_close(found, held.abs().max().view(1) / top, rtol=1e-4, atol=0)
    assert not scales
    prompt = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(out, kv_cache_dtype=element) as llm:
        got = prompt_logits(llm, prompt)
        backend = llm.core.blueprint.ctx.cache_users.users[0].planner
        assert isinstance(backend, AttentionBackend)
        written = load_file(out / "model-kv-scales.safetensors")
        assert backend.cache_scales[0] == written["model.layers.0.self_attn.k_scale"]
    assert torch.nn.functional.cosine_similarity(got, reference_logits(model, prompt), dim=-1).min() > 0.98
    with small_llm(out) as llm:
        assert torch.equal(prompt_logits(llm, prompt), prompt_logits(llm, prompt)), "unused, they are no hindrance"


def test_what_cannot_be_calibrated(
    plain: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = plain
    assert calibrated(folder, tmp_path) == 2
    assert "is there already; name a new folder" in capsys.readouterr().err
    assert calibrated(folder, tmp_path / "new", "--kv-cache-dtype", "bfloat16") == 2
    assert "scales can be calibrated for fp8, int8 and nvfp4" in capsys.readouterr().err
    (folder.parent / "text.txt").write_text("")
    try:
        assert calibrated(folder, tmp_path / "new") == 2
    finally:
        (folder.parent / "text.txt").write_text(TEXT)
    assert "--data has no tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "flags", "message"),
    [
        ("gptq-4", (), "checkpoints of quantization method 'gptq' have no scales of a cache"),
        ("fp8-channel", ("--kv-cache-dtype", "int8"), "has scales of 8-bit floats alone for a cache"),
    ],
)
def test_quantized_checkpoints_that_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, flags: tuple[str, ...], message: str
) -> None:
    write_quantized(tmp_path / "model", {f.name: f for f in FORMATS}[form])
    (tmp_path / "text.txt").write_text(TEXT)
    assert calibrated(tmp_path / "model", tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["mistral", "gptq-4"])
def test_a_checkpoint_that_cannot_be_written_is_refused_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """One in Mistral's own format, and one of a method without scales."""
    folder = tmp_path / "model"
    if form == "mistral":
        write_consolidated(folder, write_checkpoint(tmp_path / "source", "mistral", sliding_window=None))
        write_tokenizer(folder)
        message = f"{folder}/params.json: a copy with scales of a cache is written in Hugging Face's format alone"
    else:
        write_quantized(folder, {f.name: f for f in FORMATS}[form])
        message = "have no scales of a cache"
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr("hardpoint.cli.cache_calibration.measure", lambda *_: pytest.fail("it runs"))
    assert calibrated(folder, tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_scales_beside_quantized_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config says how weights are quantized, as before, and of the cache; calibrated twice is refused."""
    write_quantized(tmp_path / "model", {f.name: f for f in FORMATS}["ct-w4a16"])
    (tmp_path / "text.txt").write_text(TEXT)
    assert calibrated(tmp_path / "model", tmp_path / "out") == 0
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "out"))
    scheme = after["quantization_config"].pop("kv_cache_scheme")
    assert (scheme["type"], scheme["num_bits"]) == ("float", 8)
    del before["quantization_config"]["kv_cache_scheme"]
    assert after == before
    with small_llm(tmp_path / "out", kv_cache_dtype="fp8") as llm:
        assert len(llm.core.blueprint.model.weight_names) > 0
    assert calibrated(tmp_path / "out", tmp_path / "again") == 2
    assert "has scales of a cache already" in capsys.readouterr().err
