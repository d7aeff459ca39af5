"""Effects of a checkpoint's generation_config.json on default sampling, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hardpoint import SamplingParams
from hardpoint.engine.frontend.generation_config import GenerationConfig
from hardpoint_plugin_api import CheckpointError
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm

DRAWING = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
ALWAYS = {"repetition_penalty": 1.1, "max_new_tokens": 99}


def read(folder: Path, generation: object, config: object = None) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return GenerationConfig.read(folder)


def test_no_file_is_greedy(tmp_path: Path) -> None:
    assert GenerationConfig.read(tmp_path) == GenerationConfig()
    assert GenerationConfig().sampling_params() == SamplingParams(temperature=0.0)


@pytest.mark.parametrize("do_sample", [True, False, None])
def test_what_counts(tmp_path: Path, do_sample: bool | None) -> None:
    params = read(tmp_path, {"do_sample": do_sample, **DRAWING, **ALWAYS}).sampling_params()
    drawing: dict[str, Any] = DRAWING if do_sample else {"temperature": 0.0}
    assert params == SamplingParams(**drawing, repetition_penalty=1.1, max_tokens=99)


def test_null_leaves_the_default(tmp_path: Path) -> None:
    nulls = dict.fromkeys([*DRAWING, *ALWAYS, "eos_token_id"])
    assert read(tmp_path, {"do_sample": True, **nulls}).sampling_params() == SamplingParams()


def test_the_file_overrides_the_config(tmp_path: Path) -> None:
    config = {"eos_token_id": 1, "repetition_penalty": 1.5, "max_new_tokens": 7}
    found = read(tmp_path, {"eos_token_id": [2, 0], "max_new_tokens": 8}, config)
    assert found.eos_token_ids == {0, 2}
    assert found.sampling_params() == SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=8)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({}, {"text_config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": 7}}, {7}),
        ({}, {"eos_token_id": 3, "text_config": {"eos_token_id": 7}}, {3}),
        ({"eos_token_id": 4}, {"text_config": {"eos_token_id": 7}}, {4}),
        ({}, {"text_config": {}}, set()),
        ({}, {"text_config": None}, set()),
    ],
    ids=str,
)
def test_ends_of_the_language_model_alone(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], ends: set[int]
) -> None:
    """Count where the config of all parts has none."""
    assert read(tmp_path, generation, config).eos_token_ids == ends


def test_bad_ends_of_the_language_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: 'eos_token_id' must be a token id .*, got '</s>'"):
        read(tmp_path, {}, {"text_config": {"eos_token_id": "</s>"}})


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("top_p", 0),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", "99"),
        ("do_sample", "yes"),
        ("do_sample", 1),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [2, None]),
        ("eos_token_id", -1),
    ],
)
def test_bad_values_name_file_and_key(tmp_path: Path, name: str, key: str, value: object) -> None:
    (tmp_path / name).write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/{name}: '{key}' must be .*, got "):
        GenerationConfig.read(tmp_path)


@pytest.mark.parametrize("whole", [[], None, "x"])
def test_a_file_that_holds_no_object(tmp_path: Path, whole: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: must hold a JSON object, got "):
        read(tmp_path, whole)


def test_the_engine_takes_the_defaults(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3, "repetition_penalty": 1.2}')
    with small_llm(tmp_path) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=3)
        assert len(llm.generate([[1, 2]], use_tqdm=False)[0].outputs[0].token_ids) <= 3
