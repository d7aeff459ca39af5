"""GGUF files that llama.cpp's tools wrote (``tests/quantization/fixtures/with_gguf.py``), and damaged ones."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hardpoint import SamplingParams
from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.checkpoint.gguf.container import Container
from hardpoint.checkpoint.gguf.types import BLOCKS
from hardpoint.checkpoint.source import resolve_model
from hardpoint.config import EngineConfig
from hardpoint.dtypes import dtype_name
from hardpoint.engine.model_check import check_model
from hardpoint.tokenizer import ChatTemplate, Tokenizer
from hardpoint_plugin_api import (
    CheckpointError,
    QuantSpec,
    RequestError,
    Scheme,
    UnknownNameError,
    dequantize,
    weight_slots,
)
from tests.checkpoint.gguf_writer import write_gguf
from tests.support.engines import prompt_logits, small_llm

FIXTURES = Path(__file__).parents[1] / "quantization" / "fixtures" / "gguf"
MODELS = sorted(file.stem for file in FIXTURES.glob("*.safetensors") if file.stem != "types")
VOCABULARIES: dict[str, dict[str, list[int]]] = json.loads((FIXTURES / "vocabularies.json").read_text())
QUANTIZED = "llama-Q4_K_M"


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of the fixtures that a test may damage."""
    return Path(shutil.copy(FIXTURES / f"{request.param}.gguf", tmp_path / "model.gguf"))


# Numbers


def test_every_type_means_what_gguf_py_says() -> None:
    """To the bit: matrices that ggml quantized, and random bytes, which have every scale and sign."""
    expected = load_file(FIXTURES / "types.safetensors")
    container = Container.read(FIXTURES / "types.gguf")
    assert SPECS.keys() == BLOCKS.keys() <= expected.keys()
    for name, numbers in expected.items():
        stored = container.tensors[f"{name}.weight"].mapped()
        kind = name.removesuffix(".random")
        if kind in SPECS:
            spec, slots = SPECS[kind].spec, SPECS[kind].slots(stored)
            wanted = weight_slots(Scheme(spec, QuantSpec("float32")), [("", 2)], 512)
            assert {n: (s.shape, s.dtype) for n, s in wanted.items()} == {
                n: (tuple(x.shape), dtype_name(x.dtype)) for n, x in slots.items()
            }, kind
            got = dequantize(slots, spec, torch.float32)
        else:
            got = stored.float()
        assert torch.equal(got, numbers), name


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    """With the numbers that the file means; plain ones in float32, of an architecture each."""
    expected = load_file(FIXTURES / f"{name}.safetensors")
    with small_llm(FIXTURES / f"{name}.gguf", dtype="float32", skip_tokenizer_init=True) as llm:
        got = prompt_logits(llm, expected["prompt"].tolist())
    error = float((got - expected["logits"]).abs().max() / expected["logits"].abs().max())
    assert error < 2e-5, error


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Of Qwen3-Next, whose files count them among the blocks."""
    container, expected = (Container.read(FIXTURES / "qwen3next.gguf"), load_file(FIXTURES / "qwen3next.safetensors"))
    metadata, tensors = dict(container.metadata), dict(container.tensors)
    assert metadata["qwen3next.block_count"] == 4
    metadata |= {"qwen3next.block_count": 5, "qwen3next.nextn_predict_layers": 1}
    metadata["qwen3next.attention.recurrent_layers"] = [*metadata["qwen3next.attention.recurrent_layers"], False]
    tensors |= {n.replace("blk.3.", "blk.4."): t for n, t in tensors.items() if n.startswith("blk.3.")}
    file = tmp_path / "model.gguf"
    write_gguf(file, metadata, tensors | {"blk.4.nextn.eh_proj.weight": torch.zeros(32, 64)})
    with small_llm(file, dtype="float32", skip_tokenizer_init=True) as llm:
        got = prompt_logits(llm, expected["prompt"].tolist())
    assert float((got - expected["logits"]).abs().max() / expected["logits"].abs().max()) < 2e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, metadata: tensors.pop("blk.0.attn_gate.weight"),
            "attn_qkv and attn_gate of block 0 must both",
        ),
        (lambda tensors, metadata: metadata.pop("qwen3next.ssm.group_count"), "numbers qwen3next.ssm.group_count and"),
        (lambda tensors, metadata: metadata.update({"qwen3next.ssm.group_count": 3}), "are not those of 3 key heads"),
    ],
    ids=["gate", "number", "groups"],
)
def test_rows_that_cannot_take_turns(tmp_path: Path, change: Callable[..., object], message: str) -> None:
    container = Container.read(FIXTURES / "qwen3next.gguf")
    metadata, tensors = dict(container.metadata), dict(container.tensors)
    change(tensors, metadata)
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(CheckpointError, match=message):
        open_files(tmp_path / "model.gguf").tensors()


def test_greedy_tokens_are_those_of_transformers() -> None:
    """Teacher-forced: each drawn token is the likeliest by the logits that Transformers has for the prompt."""
    expected = load_file(FIXTURES / f"{QUANTIZED}.safetensors")
    prompt = expected["prompt"].tolist()
    with small_llm(FIXTURES / f"{QUANTIZED}.gguf", dtype="float32", skip_tokenizer_init=True) as llm:
        prompts: list[Any] = [{"prompt_token_ids": prompt[:n]} for n in (1, 7, 20, 40)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    drawn = [output.outputs[0].token_ids[0] for output in outputs]
    assert drawn == [int(expected["logits"][n - 1].argmax()) for n in (1, 7, 20, 40)]


def test_what_a_vocabulary_alone_and_ids_alone_cannot_do() -> None:
    with pytest.raises(CheckpointError, match=r"vocabulary-qwen2\.gguf holds a vocabulary and no weights; give"):
        small_llm(FIXTURES / "vocabulary-qwen2.gguf")
    with (
        small_llm(FIXTURES / "qwen3-tied-Q4_0.gguf", skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match=r"no tokenizer was loaded \(--skip-tokenizer-init\), so there are no chats"),
    ):
        llm.chat([{"role": "user", "content": "?"}])


def test_matrices_stay_in_their_blocks() -> None:
    """Only the embedding that is no head becomes plain numbers; modules of one type are merged."""
    with small_llm(FIXTURES / f"{QUANTIZED}.gguf", skip_tokenizer_init=True) as llm:
        modules: dict[str, Any] = dict(llm.core.blueprint.model.named_modules())
        assert modules["embedding"].weights["weight"].dtype == torch.bfloat16
    specs = {p: str(m.scheme.weight) for p, m in modules.items() if getattr(m, "scheme", None) is not None}
    assert specs["head.linear"] == "int6@int8:1x16@float16:1x256"
    assert specs["stack.blocks.0.feed_forward.gate_up"] == "uint4@uint8:1x32@float16:1x256+min"
    with small_llm(FIXTURES / "qwen3-tied-Q4_0.gguf", skip_tokenizer_init=True) as llm:
        head: Any = dict(llm.core.blueprint.model.named_modules())["head.linear"]
    assert not head.scheme.weight.is_plain


# Vocabularies


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_are_the_source_tokenizers(name: str) -> None:
    """Token ids equal those of llama.cpp, or of sentencepiece itself, and decode to the text."""
    tokenizer = Tokenizer.load(FIXTURES / f"vocabulary-{name}.gguf")
    for text, ids in VOCABULARIES[name].items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        plain = text if name != "qwen2" and name != "qwen35" else None  # these normalize
        if plain is not None and "<" not in text:
            assert tokenizer.decode(ids) == plain


def test_special_tokens_and_the_template_are_the_files() -> None:
    file = FIXTURES / "vocabulary-llama-bpe.gguf"
    tokenizer = Tokenizer.load(file)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.encode("hi")[0] == 0  # llama-bpe adds the beginning where the file does not say
    assert Tokenizer.load(FIXTURES / "vocabulary-qwen2.gguf").encode("hi")[0] != 0
    template = ChatTemplate.load(file, tokenizer.special_tokens)
    text = template.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>hi<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False)[0] == tokenizer.added_tokens["<|im_start|>"]
    assert tokenizer.decode(tokenizer.encode(f"{text}<tool>")) == "hi<tool>"  # the user's own token is no special one
    assert open_files(file).read_json("generation_config.json") == {"eos_token_id": [2]}


def test_one_file_is_all_that_an_engine_needs(tmp_path: Path) -> None:
    """Text and chats, with the file's own tokenizer, template and end; a server's first look, too."""
    words = ["<s>", "</s>", "<|im_end|>", *map(chr, range(ord("a"), ord("a") + 26)), "\u0120"]
    words += [f"[PAD{i}]" for i in range(len(words), 64)]
    kinds = [3] * 3 + [1] * 27 + [5] * 34
    vocabulary = {"model": "gpt2", "pre": "gpt-2", "tokens": words, "token_type": kinds, "eos_token_id": 1}
    metadata = dict(Container.read(FIXTURES / "qwen3.gguf").metadata)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    file = tmp_path / "model.gguf"
    write_gguf(file, metadata, dict(Container.read(FIXTURES / "qwen3.gguf").tensors))
    check_model(EngineConfig.create(model=str(file)))
    with small_llm(file, dtype="float32") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=5)
        (text,) = llm.generate(["hello world"], params)
        (chat,) = llm.chat([{"role": "user", "content": "hello"}], params)
        assert llm.eos_token_ids == {1, 2}
    assert text.prompt_token_ids == [10, 7, 14, 14, 17, 29, 25, 17, 20, 14, 6]
    assert chat.prompt_token_ids == [10, 7, 14, 14, 17, 2]
    logits = open_files(file).tensors().names
    assert "lm_head.weight" in logits
    assert text.outputs[0].text == "".join(words[i] for i in text.outputs[0].token_ids if 3 <= i < 29).strip()


# Choosing among files


def test_a_folder_with_several_needs_a_name(tmp_path: Path) -> None:
    for quant in ("Q4_K_M", "Q4_K_S", "Q8_0"):
        shutil.copy(FIXTURES / f"{QUANTIZED}.gguf", tmp_path / f"tiny-{quant}.gguf")
    (tmp_path / "mmproj-tiny.gguf").touch()
    assert resolve_model(f"{tmp_path}:q4_k_m").name == "tiny-Q4_K_M.gguf"
    with pytest.raises(CheckpointError, match=r"several GGUF files: tiny-Q4_K_M\.gguf, .*:Q4_K_M"):
        resolve_model(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no GGUF file with 'Q5_K' in its name; there are tiny-Q4_K_M\.gguf"):
        resolve_model(f"{tmp_path}:Q5_K")
    for file in ("tiny-Q4_K_S.gguf", "tiny-Q8_0.gguf"):
        (tmp_path / file).unlink()
    assert resolve_model(str(tmp_path)).name == "tiny-Q4_K_M.gguf"


def test_a_split_model_is_read_from_all_its_parts(tmp_path: Path) -> None:
    """Its second part has tensors alone."""
    whole = Container.read(FIXTURES / "qwen3.gguf")
    names = list(whole.tensors)
    parts = [tmp_path / f"m-{n:05}-of-00002.gguf" for n in (1, 2)]
    write_gguf(parts[0], dict(whole.metadata), {name: whole.tensors[name] for name in names[:9]})
    write_gguf(parts[1], {}, {name: whole.tensors[name] for name in names[9:]})
    assert resolve_model(str(tmp_path)) == parts[0]
    found = dict(open_files(parts[1]).tensors())
    for name, tensor in open_files(FIXTURES / "qwen3.gguf").tensors():
        assert torch.equal(found.pop(name), tensor)
    assert not found
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"parts of the model are missing: m-00002-of-00002\.gguf"):
        open_files(parts[0])


# Damage


@pytest.mark.parametrize("copy", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"GGML" + data[4:], r"is no GGUF file: it begins with b'GGML', not b'GGUF'; copy"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "it has version 1; GGUF of versions 2 and 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "it is big-endian"),
        (lambda data: data[:-64], "damaged or truncated GGUF file: tensor .* ends at byte"),
        (lambda data: data[:900], "damaged or truncated GGUF file"),
        (lambda data: b"", "cannot be read: cannot mmap an empty file"),
        (lambda data: data.replace(b"qwen3", b"qwem3"), "unknown GGUF architecture 'qwem3'.*did you mean 'qwen3'"),
        (
            lambda data: data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"),
            r"missing tensors: model\.layers\.0\.mlp\.up_proj\.weight.*no place for: blk\.0\.ffn_xx\.weight",
        ),
    ],
)
def test_damage_is_named(copy: Path, damage: Any, message: str) -> None:
    copy.write_bytes(damage(copy.read_bytes()))
    with (
        pytest.raises((CheckpointError, UnknownNameError), match=message) as raised,
        small_llm(copy, skip_tokenizer_init=True),
    ):
        pass
    assert str(copy) in str(raised.value)


def test_types_and_vocabularies_that_are_not_read_are_named(tmp_path: Path) -> None:
    metadata = dict(Container.read(FIXTURES / "qwen3.gguf").metadata)
    file = tmp_path / "m.gguf"
    write_gguf(file, metadata, {}, unread=("blk.0.ffn_up.weight", 16))
    with pytest.raises(
        CheckpointError, match=r"'blk\.0\.ffn_up\.weight' has type IQ2_XXS, which is not read; read are"
    ):
        open_files(file)
    words = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]}
    write_gguf(file, metadata | words | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen3000"}, {})
    with pytest.raises(UnknownNameError, match=r"GGUF pre-tokenizer 'qwen3000'.*--tokenizer"):
        Tokenizer.load(file)
    write_gguf(file, metadata | words | {"tokenizer.ggml.model": "t5"}, {})
    with pytest.raises(UnknownNameError, match=r"GGUF tokenizer 't5'; known: gpt2, llama.*--tokenizer"):
        Tokenizer.load(file)
    write_gguf(file, metadata, {})
    with pytest.raises(CheckpointError, match=r"m\.gguf holds no tokenizer; name a folder .*--tokenizer"):
        Tokenizer.load(file)


@pytest.mark.parametrize(
    ("name", "metadata", "tensors", "message"),
    [
        ("qwen3", {"qwen3.block_count": 2_000_000_000}, {}, r"block_count is 2000000000, and there are .* 2 blocks"),
        ("qwen3moe", {"qwen3moe.expert_count": 0}, {}, r"qwen3moe\.expert_count is missing or 0; qwen3moe is read"),
        ("qwen3", {}, {"rope_freqs.weight": torch.empty(0)}, r"rope_freqs\.weight has 0 numbers, and rope\.freq_base"),
        (
            "qwen3",
            {"qwen3.rope.freq_base": "high"},
            {"rope_freqs.weight": torch.ones(4)},
            r"rope_freqs\.weight has 4 numbers, and rope\.freq_base is 'high'",
        ),
        ("qwen3", {}, {"token_embd.weight": torch.tensor(1.0)}, r"'token_embd\.weight' has 0 axes; 1 to 4 are read"),
        ("qwen3", {}, {"token_embd.weight": torch.ones(64)}, r"'vocab_size'"),
    ],
)
def test_settings_that_cannot_be_are_named(
    tmp_path: Path, name: str, metadata: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    """At once: a model of two thousand million blocks is not built first."""
    whole, file = Container.read(FIXTURES / f"{name}.gguf"), tmp_path / "model.gguf"
    write_gguf(file, {**whole.metadata, **metadata}, {**whole.tensors, **tensors})
    with pytest.raises(CheckpointError, match=message), small_llm(file, skip_tokenizer_init=True):
        pass


def test_names_and_lists_of_the_container_are_checked(tmp_path: Path) -> None:
    (file := tmp_path / "m-00001-of-00000.gguf").touch()
    with pytest.raises(CheckpointError, match=r"the name says part 1 of 0; rename the file"):
        open_files(file)
    metadata, file = dict(Container.read(FIXTURES / "qwen3.gguf").metadata), tmp_path / "m.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    file.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + nested)
    with pytest.raises(CheckpointError, match="damaged or truncated GGUF file: maximum recursion depth"):
        open_files(file)
    write_gguf(file, metadata, {"a": torch.ones(1), "b": torch.ones(1)})
    file.write_bytes(file.read_bytes().replace(struct.pack("<Q", 1) + b"b", struct.pack("<Q", 1) + b"a"))
    with pytest.raises(CheckpointError, match=r"tensor 'a' stands there twice; convert the model anew"):
        open_files(file)


def test_settings_of_a_vocabulary_are_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A special token beyond the vocabulary is left out with a warning, as llama.cpp does."""
    whole, file = Container.read(FIXTURES / "vocabulary-llama-bpe.gguf"), tmp_path / "m.gguf"
    write_gguf(file, {**whole.metadata, "tokenizer.ggml.padding_token_id": 2**32 - 1}, {})
    assert Tokenizer.load(file).eos_token_id == 2
    assert "tokenizer.ggml.padding_token_id is 4294967295, of" in caplog.text
    for key, value, message in (
        ("tokenizer.ggml.add_bos_token", "false", r"add_bos_token must be true or false, got 'false'"),
        ("tokenizer.chat_templates", 7, r"tokenizer\.chat_templates must be a list of names, got 7"),
    ):
        write_gguf(file, {**whole.metadata, key: value}, {})
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(file)
