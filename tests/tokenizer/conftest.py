from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.tokenizer import Tokenizer
from tests.tokenizer.builders import LLAMA_CONFIG, QWEN_CONFIG, llama_style, qwen_style, word_piece_style, write


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llama"), llama_style(), LLAMA_CONFIG)


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen"), qwen_style(), QWEN_CONFIG)


@pytest.fixture(scope="session")
def word_piece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return write(tmp_path_factory.mktemp("word_piece"), word_piece_style(), config)


@pytest.fixture(scope="session", params=["llama", "qwen", "word_piece"])
def folder(request: pytest.FixtureRequest) -> Path:
    """Each style of tokenizer in turn."""
    path: Path = request.getfixturevalue(f"{request.param}_folder")
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)
