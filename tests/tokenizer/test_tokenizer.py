"""The tokenizer against Transformers' own on small tokenizers of each style."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import CheckpointError, RequestError
from tests.tokenizer.builders import LLAMA_CONFIG, QWEN_CONFIG, llama_style, qwen_style, word_piece_style, write

SAMPLES = [
    "",
    " ",
    "Hello world",
    "  two leading spaces, trailing  ",
    "I'm 42 and it's 3.14\n\n\tok",
    "東京タワー 🗼👩‍👩‍👧 é e\u0301",
    "<s>not</s> the <unk> beginning",
    "<|im_start|>user\nhi<|im_end|>\n<think>hm</think>",
    "[CLS] x [SEP]",
    "\x00\x7f\ufffd",
]


def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("style", "config"), [(llama_style, LLAMA_CONFIG), (qwen_style, QWEN_CONFIG)])
@pytest.mark.parametrize("text", ["ab 東 " * 60_000, "x" * 200_000, " " * 200_000], ids=["words", "word", "blanks"])
def test_a_text_that_exceeds_a_limit_does(tmp_path: Path, style: Any, config: Any, text: str) -> None:
    """Counted in pieces, and never more than there are."""
    tokenizer = Tokenizer.load(write(tmp_path, style(), config))
    count = len(tokenizer.encode(text))
    assert not tokenizer.exceeds(text, count)
    assert not tokenizer.exceeds("short", 2)
    assert tokenizer.exceeds(text, count // 8) or count < len(text) // 4


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encodes_and_decodes_as_transformers(folder: Path, text: str, add_special_tokens: bool) -> None:
    ours, reference = Tokenizer.load(folder), theirs(folder)
    ids = ours.encode(text, add_special_tokens)
    assert ids == reference.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_special_ids_and_size_are_those_of_transformers(folder: Path) -> None:
    ours, reference = Tokenizer.load(folder), theirs(folder)
    assert ours.vocab_size == len(reference)
    assert ours.special_ids >= set(reference.all_special_ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(reference, name), name


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize("with_post_processor", [True, False])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_what_is_put_around_a_text(
    tmp_path: Path, add_bos: bool | None, add_eos: bool | None, with_post_processor: bool, kind: str
) -> None:
    backend = llama_style()
    if not with_post_processor:
        stripped = json.loads(backend.to_str())
        stripped["post_processor"] = None
        backend = type(backend).from_str(json.dumps(stripped))
    flags = {k: v for k, v in (("add_bos_token", add_bos), ("add_eos_token", add_eos)) if v is not None}
    base = {k: v for k, v in LLAMA_CONFIG.items() if k not in ("add_bos_token", "add_eos_token")}
    folder = write(tmp_path, backend, {**base, **flags, "tokenizer_class": kind})
    assert Tokenizer.load(folder).encode("Hello world") == theirs(folder).encode("Hello world")


def test_tokens_that_only_the_config_declares_are_added(tmp_path: Path) -> None:
    config = {
        **QWEN_CONFIG,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "image_token": "<|image|>",
        "additional_special_tokens": ["<|tool|>"],
    }
    folder = write(tmp_path, qwen_style(), config)
    ours, reference = Tokenizer.load(folder), theirs(folder)
    text = "<|begin|>a<|image|>b<|tool|>c"
    assert ours.encode(text) == reference.encode(text)
    assert ours.vocab_size == len(reference)
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.special_tokens["image_token"] == "<|image|>"


def test_special_tokens_of_the_older_file_count(tmp_path: Path) -> None:
    folder = write(tmp_path, llama_style(), {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    ours = Tokenizer.load(folder)
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.eos_token_id == theirs(folder).eos_token_id


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = llama_style()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    ids = Tokenizer.load(write(tmp_path, backend, LLAMA_CONFIG)).encode("Hello world, how are you")
    assert 3 < len(ids) < 64


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    tokenizer = _qwen()
    assert tokenizer.decode(
        tokenizer.encode(text), skip_special_tokens=False
    ) == tokenizer.backend.normalizer.normalize_str(text)


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_the_bytes_of_tokens_make_up_the_text(text: str) -> None:
    for tokenizer, space in ((_qwen(), ""), (_llama(), " ")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert joined.decode() == (space if ids else "") + decoded, "the decoder drops the very first space"


def test_the_bytes_of_one_token(tokenizer: Tokenizer) -> None:
    for token, token_id in tokenizer.added_tokens.items():
        assert tokenizer.token_bytes(token_id) == token.encode()
    for byte in (0x0A, 0x41, 0xE6) if tokenizer.byte_ids else ():
        assert tokenizer.token_bytes(_id(tokenizer, f"<0x{byte:02X}>")) == bytes([byte])
    assert tokenizer.token_bytes(10**6) == b"", "no such token"


def test_bytes_of_other_decoders() -> None:
    metaspace, pieces, byte_level = llama_style(), word_piece_style(), qwen_style()
    metaspace.decoder = decoders.Metaspace(replacement="▁")
    byte_level.decoder = decoders.Sequence([decoders.ByteLevel()])
    byte_level.add_tokens(["▁漢"])
    for backend, token, wanted in (
        (metaspace, "▁t", b" t"),
        (metaspace, "<0xE6>", b"<0xE6>"),  # text to this decoder
        (pieces, "##e", b"##e"),
        (byte_level, "Ġ", b" "),
        (byte_level, "▁漢", "▁漢".encode()),
    ):
        ours = Tokenizer(backend, {})
        assert ours.token_bytes(_id(ours, token)) == wanted


def _id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.backend.token_to_id(token)
    assert token_id is not None, token
    return token_id


@cache
def _llama() -> Tokenizer:
    return Tokenizer(llama_style(), {})


@cache
def _qwen() -> Tokenizer:
    return Tokenizer(qwen_style(), {})


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at position 1"):
        tokenizer.encode("a\ud800b")


def test_without_tokenizer_json_transformers_converts(tmp_path: Path) -> None:
    backend = qwen_style()
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(QWEN_CONFIG))
    ours, reference = Tokenizer.load(tmp_path), theirs(tmp_path)
    assert ours.encode("Hello world<|im_end|>") == reference.encode("Hello world<|im_end|>")
    assert ours.eos_token_id == reference.eos_token_id


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, "", r"tokenizer\.json is missing, and so are tekken.json and older files \(tokenizer\.model"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config.json: must hold a JSON object"),
        ("tokenizer_config.json", "{", r"tokenizer_config.json: cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str | None, content: str, message: str) -> None:
    if name:
        write(tmp_path, qwen_style(), QWEN_CONFIG)
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("added_tokens_decoder", [], "an object of token ids"),
        ("added_tokens_decoder", {"x": {"content": "<a>"}}, "an object of token ids"),
        ("added_tokens_decoder", {"7": "<a>"}, "an object of token ids"),
        ("added_tokens_decoder", {"7": {"special": True}}, "an object of token ids"),
        ("added_tokens_decoder", {"7": {"content": "<a>", "lstrip": "yes"}}, "an object of token ids"),
        ("eos_token", {"content": 3}, "a text or an object with the text 'content'"),
        ("eos_token", 3, "a text or an object"),
        ("image_token", {"content": None}, "a text or an object"),
        ("extra_special_tokens", [3], "a list or object of tokens"),
        ("extra_special_tokens", {"image_token": []}, "a list or object of tokens"),
        ("additional_special_tokens", "<a>", "a list or object of tokens"),
        ("split_special_tokens", "no", "true or false"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_bad_keys_are_named(tmp_path: Path, name: str, key: str, value: object, message: str) -> None:
    write(tmp_path, qwen_style(), {})
    (tmp_path / name).write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError, match=rf"{name}: '{key}' must be {message}.*, got "):
        Tokenizer.load(tmp_path)


def test_null_counts_as_missing(tmp_path: Path) -> None:
    config = dict.fromkeys(("added_tokens_decoder", "bos_token", "extra_special_tokens", "split_special_tokens"))
    tokenizer = Tokenizer.load(write(tmp_path, qwen_style(), config))
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "and so are tekken.json and older files"),
        ("vocab.json", r"Transformers cannot make one of vocab\.json: [^\n]+$"),
        ("vocab.txt", r"cannot make one of vocab\.txt: its LlamaTokenizer reads tokenizer\.json, tokenizer\.model$"),
    ],
)
def test_no_empty_tokenizer_is_made_up(tmp_path: Path, file: str | None, message: str) -> None:
    name = "Qwen2Tokenizer" if file == "vocab.json" else "LlamaTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    if file:
        (tmp_path / file).write_text('{"a": 0}')
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json is missing, .*{message}"):
        Tokenizer.load(tmp_path)


def test_loading_imports_neither_transformers_nor_torch(qwen_folder: Path) -> None:
    code = (
        "import sys, pathlib; from hardpoint.tokenizer import Tokenizer; "
        "Tokenizer.load(pathlib.Path(sys.argv[1])).encode('hi'); "
        "print([m for m in ('torch', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(qwen_folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
