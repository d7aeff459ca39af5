"""Streaming: whatever the ids and wherever they split the text, the deltas are the text, cut at the stop text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.tokenizer import Detokenizer, Tokenizer
from tests.support.examples import examples
from tests.tokenizer.builders import llama_style, qwen_style, word_piece_style

STYLES = {
    "llama": Tokenizer(llama_style(), {}),
    "qwen": Tokenizer(qwen_style(), {}),
    "word_piece": Tokenizer(word_piece_style(), {}),
}
TEXTS = st.text(st.sampled_from(" abcoédé東🗼\n") | st.characters(exclude_categories=["Cs"]), max_size=40)
SMALL = st.text("abc", min_size=1, max_size=4)


@st.composite
def ids_of(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    """Any ids of any style: tokens of real text, and blindly drawn ones (broken UTF-8, special, unknown)."""
    tokenizer = STYLES[draw(st.sampled_from(sorted(STYLES)))]
    blind = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24)
    real = TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return tokenizer, [i for part in draw(st.lists(blind | real, max_size=4)) for i in part]


def stream(detokenizer: Detokenizer, ids: Sequence[int], chunk: int = 1) -> list[str]:
    parts = [detokenizer.add(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    return [*parts, detokenizer.flush()]


@given(ids_of(), st.booleans(), st.integers(1, 3))
@examples(120)
def test_the_deltas_are_the_text(drawn: tuple[Tokenizer, list[int]], skip: bool, chunk: int) -> None:
    tokenizer, ids = drawn
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(stream(detokenizer, ids, chunk))
    assert text == tokenizer.decode(ids, skip)
    assert detokenizer.num_chars == len(text)


@given(st.sampled_from(sorted(STYLES)), TEXTS)
@examples(60)
def test_no_delta_shows_half_a_character(style: str, text: str) -> None:
    tokenizer = STYLES[style]
    ids = tokenizer.encode(text.replace("\N{REPLACEMENT CHARACTER}", ""), add_special_tokens=False)
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in stream(Detokenizer(tokenizer), ids))


@given(ids_of(), ids_of())
@examples(60)
def test_with_a_prompt_the_output_is_what_it_adds(
    first: tuple[Tokenizer, list[int]], second: tuple[Tokenizer, list[int]]
) -> None:
    tokenizer, ids = first
    prompt = tokenizer.encode("The quick fox", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt)
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


def test_a_prompt_that_ends_within_a_character_is_completed() -> None:
    tokenizer = STYLES["qwen"]
    ids = tokenizer.encode("x🗼", add_special_tokens=False)
    assert len(ids) > 2
    detokenizer = Detokenizer(tokenizer, prompt_ids=ids[:-1])
    assert detokenizer.add(ids[-1:]) == "🗼"


@given(st.text("abc", max_size=12), st.lists(SMALL, max_size=3), st.lists(st.integers(1, 4)), st.booleans())
@examples(150)
def test_stop_texts_are_found_wherever_the_text_is_split(
    text: str, stop: list[str], cuts: list[int], include: bool
) -> None:
    tokenizer = STYLES["qwen"]
    ids = [i for letter in text for i in tokenizer.encode(letter)]
    detokenizer = Detokenizer(tokenizer, stop=stop, include_stop=include)
    parts = []
    for cut in [*cuts, len(ids)]:
        parts.append(detokenizer.add(ids[:cut]))
        ids = ids[cut:]
    parts.append(detokenizer.flush())
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    if not ends:
        assert ("".join(parts), detokenizer.stop_text) == (text, None)
        return
    found = max((s for s in stop if text[: ends[0]].endswith(s)), key=len)
    assert detokenizer.stop_text == found
    assert "".join(parts) == text[: ends[0] - (0 if include else len(found))]
    assert detokenizer.num_chars == len("".join(parts))


@pytest.mark.parametrize("stop", ["</s>", "\n\n", "Übergröße", "🗼"])
def test_text_that_may_be_the_start_of_a_stop_text_is_held_back(stop: str) -> None:
    tokenizer = STYLES["qwen"]
    detokenizer = Detokenizer(tokenizer, stop=[stop])
    shown = ""
    for token in tokenizer.encode(f"some words{stop} and more"):
        shown += detokenizer.add([token])
        assert "some words".startswith(shown)
    assert shown == "some words"
    assert detokenizer.num_chars == len(shown)
    assert detokenizer.flush() == detokenizer.add([1, 2]) == ""


def test_the_end_gives_out_what_was_held_back() -> None:
    tokenizer = STYLES["qwen"]
    detokenizer = Detokenizer(tokenizer, stop=["ab!"])
    assert detokenizer.add(tokenizer.encode("x a")) + detokenizer.add(tokenizer.encode("b")) == "x "
    assert detokenizer.flush() == "ab"
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_are_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens behind, and each is decoded a few times only: a stream of them would hold up all others."""
    tokenizer = STYLES["qwen"]
    byte = tokenizer.encode("東", add_special_tokens=False)[-1]
    decode, lengths = tokenizer.decode, list[int]()
    assert decode([byte]) == "\N{REPLACEMENT CHARACTER}"

    def counted(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = Detokenizer(tokenizer)
    *deltas, rest = stream(detokenizer, [byte] * 200)
    assert len("".join(deltas)) >= 190
    assert max(lengths) <= 16
    assert "".join(deltas) + rest == decode([byte] * 200)
