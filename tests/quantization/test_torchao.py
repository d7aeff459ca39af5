"""torchao's formats: logits, ranks, layouts and errors. test_fixtures.py has checkpoints that the tool wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hardpoint.checkpoint import safetensors_files
from hardpoint.quantization.methods.torchao_tiles import in_rows, stored_tiles
from hardpoint_plugin_api import CheckpointError, ConfigError, Module, Scale
from tests.parallel.ranks import ranks_in_threads
from tests.quantization.torchao_formats import TORCHAO, described, int4_tiles, with_minima
from tests.quantization.writing import Format, change_config, change_tensors, write_quantized
from tests.support.checkpoints import random_prompts, reference_logits
from tests.support.engines import prompt_logits, small_llm

BY_NAME = {form.name: form for form in TORCHAO}
MODULE = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("form", TORCHAO, ids=str)
def test_logits_are_those_of_the_stored_numbers(tmp_path: Path, form: Format) -> None:
    model = write_quantized(tmp_path, form, num_hidden_layers=2)
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        got = prompt_logits(llm, ids)
        specs = " ".join(row.workload for row in llm.table.rows if row.family == "linear")
    assert "@" in specs, "nothing was quantized"
    assert (got - reference_logits(model, ids)).abs().max() < 2e-4


@pytest.mark.parametrize("form", [f for f in TORCHAO if f.name != "torchao-int4-tiles"], ids=str)
def test_two_ranks_compute_what_one_does(tmp_path: Path, form: Format) -> None:
    write_quantized(tmp_path, form, "qwen2", intermediate_size=128, num_key_value_heads=4)
    ids = random_prompts(1, 24, seed=4, shortest=20)[0]
    with small_llm(tmp_path) as llm:
        alone = llm.generate([ids], use_tqdm=False)[0].outputs[0].token_ids
    with ranks_in_threads(tmp_path, 2) as llm:
        assert llm.generate([ids], use_tqdm=False)[0].outputs[0].token_ids == alone


def test_tiles_that_are_padded_belong_to_one_rank(tmp_path: Path) -> None:
    write_quantized(tmp_path, BY_NAME["torchao-int4-tiles"], "qwen2", intermediate_size=128, num_key_value_heads=4)
    with pytest.raises(ConfigError, match="in a form that ranks cannot divide"), ranks_in_threads(tmp_path, 2):
        pass


def test_tiles_of_whole_steps_can_be_cut() -> None:
    """A rank's rows and columns are a block of the tiles, and mean the same elements."""
    weight = torch.randn(16, 2048, generator=torch.Generator().manual_seed(0))
    stored, _ = int4_tiles("", weight)
    q = with_minima(weight, 32)[0]
    words = stored["_weight_qdata"]
    assert torch.equal(in_rows(words), (q & 15).to(torch.uint8))
    assert torch.equal(in_rows(words[1:, 8:]), (q[8:, 1024:] & 15).to(torch.uint8))
    tensors = stored_tiles(Module("m", 16, 2048), Scale("bfloat16", (1, 32)))
    assert [t.shape(16, 2048) for t in tensors] == [tuple(x.shape) for x in stored.values()]


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the checkpoint is streamed: by then, weights are being read."""

    def fail(self: Any) -> Any:
        raise AssertionError("weights were read before the error was found")

    monkeypatch.setattr(safetensors_files.SafetensorsFiles, "__iter__", fail)


def _metadata(text: str | None) -> Callable[[Path], None]:
    """Give one module other metadata."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        texts = dict(safetensors_files.SafetensorsFiles(folder).metadata)
        texts.pop(f"{MODULE}.weight")
        save_file(load_file(file), file, metadata=texts | ({} if text is None else {f"{MODULE}.weight": text}))

    return change


def _add(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda x: x.update({f"{MODULE}.{name}": torch.ones(1)}))


INT8 = {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"mapping_type": {"_data": "PRESERVE_ZERO"}}}
LIMITED = {"_type": "QuantizeTensorToFloat8Kwargs", "_data": {"hp_value_ub": 2.0}}
ERRORS = [
    (_metadata(None), r"metadata of the safetensors files does not describe '.*up_proj\.weight'.*Transformers 5"),
    (_metadata("no JSON"), r"metadata of the safetensors files does not describe '.*up_proj\.weight'"),
    (_metadata(described("NVFP4Tensor", (1, 16))), r"stored as torchao's NVFP4Tensor, which is not read; read are Fl"),
    (_metadata(described("Float8Tensor", (32,) * 3)), r"'block_size' must be rows and columns, got \[32, 32, 32\]"),  # type: ignore[arg-type]  # the error is the subject
    (_metadata(described("Int8Tensor", (1, 64), act_quant_kwargs=INT8)), r"'_data' must be one of SYMMETRIC, ASYMM"),
    (_metadata(described("Float8Tensor", (32, 32), act_quant_kwargs=LIMITED)), r"'hp_value_ub' must be null: limits"),
    (_add("_weight_act_pre_scale"), r"up_proj\._weight_act_pre_scale' is stored, and scales of activations are not"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=lambda value: value[:40] if type(value) is str else "")
def test_errors(tmp_path: Path, no_reading: None, change: Callable[[Path], None], message: str) -> None:
    write_quantized(tmp_path, BY_NAME["torchao-float8-tiles"])
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        small_llm(tmp_path)


def test_zero_points_that_the_config_does_not_ask_for(tmp_path: Path) -> None:
    write_quantized(tmp_path, BY_NAME["torchao-intx8-asymmetric"])
    change_config(tmp_path, quantization_config={"quant_method": "torchao", "quant_type": {"default": {}}})
    with pytest.raises(CheckpointError, match=r"_weight_zero_point': is not 0 throughout, and the config says"):
        small_llm(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_quantized(tmp_path: Path, tied: bool) -> None:
    """Read where it is the output head, too; refused where it is looked up alone."""
    form = BY_NAME["torchao-intx8-asymmetric"]
    model = write_quantized(tmp_path, form, tie_word_embeddings=tied)
    file, name = tmp_path / "model.safetensors", "model.embed_tokens"
    texts = dict(safetensors_files.SafetensorsFiles(tmp_path).metadata)
    tensors = load_file(file)
    stored, numbers = form.write(name, tensors.pop(f"{name}.weight").float())
    tensors |= {f"{name}.{key}": value.contiguous() for key, value in stored.items()}
    save_file(tensors, file, metadata=texts | {f"{name}.weight": str(form.metadata)})
    if not tied:
        with pytest.raises(CheckpointError, match=r"embedding 'model.embed_tokens' is quantized, which is read only "):
            small_llm(tmp_path)
        return
    dict(model.named_parameters())[f"{name}.weight"].data = numbers
    ids = random_prompts(1, 40, seed=5, shortest=24)[0]
    with small_llm(tmp_path) as llm:
        assert (prompt_logits(llm, ids) - reference_logits(model, ids)).abs().max() < 2e-4
