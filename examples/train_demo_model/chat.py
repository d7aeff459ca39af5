"""Conversations in ChatML, cut mechanically out of the corpus: no sentence in an answer is invented.

A small model learns from them three things: who speaks, to answer in English sentences, and to stop.
"""

import random
import re
from collections.abc import Iterator

from sources import Document

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant. Answer in a few sentences.")
CONTINUE = ("Continue: {}", "Continue this passage: {}", "Continue the text: {}", "What comes next? {}", "{}", "{}")
MANNER = ("Write a paragraph in the manner of {}.", "Write something like {}.", "Write in the style of {}.")
TOPIC = ("Tell me about {}.", "What do you know about {}?", "Write a few sentences about {}.", "Let us talk about {}.")
DEFINE = ("What is {}?", "What does {} mean?", "Define {}.", "Explain the word {}.")
OPENING = ("Hello!", "Hi.", "Hello, how are you?", "Tell me a story.", "Tell me something.", "Write something.")
GO_ON = ("Go on.", "Continue.", "And then?", "Tell me more.", "What happened next?")
NO_TOPIC = {"before", "should", "though", "through", "without", "because", "himself", "herself", "itself", "having"}
FICTION = ("Jane Austen", "Arthur Conan Doyle", "Mark Twain")

SENTENCE = re.compile(r"""\S.*?(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?]["')]*(?=\s+["'(A-Z]|$)""")
MAX_ANSWER = 600  # characters, some 130 tokens


def render(turns: list[tuple[str, str]]) -> str:
    """The text that `CHAT_TEMPLATE` renders for (role, content) pairs."""
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in turns)


def answer_from(sentences: list[str], rng: random.Random) -> str:
    """The first one to five of the sentences, within `MAX_ANSWER`; empty when even one is too long."""
    answer = ""
    for sentence in sentences[: rng.randint(1, 5)]:
        if len(answer) + len(sentence) > MAX_ANSWER:
            break
        answer = f"{answer} {sentence}".lstrip()
    return answer


def question_for(document: Document, sentences: list[str], rng: random.Random) -> tuple[str, int]:
    """A user's message, and the number of leading sentences that it has used up."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(CONTINUE).format(sentences[0]), 1
    if kind < 0.6:
        return rng.choice(MANNER).format(document.manner), 0
    if kind < 0.75 and document.manner in FICTION:
        return rng.choice(OPENING), 0
    topics = [word for word in re.findall(r"\b[a-z]{6,}\b", sentences[0]) if word not in NO_TOPIC]
    return rng.choice(TOPIC).format(rng.choice(topics or ["life"])), 0


def conversations(document: Document, rng: random.Random) -> Iterator[str]:
    """ChatML texts from some of the document's paragraphs, fiction preferred; a dictionary entry always gives one."""
    if term := document.definition_of:
        definition = re.sub(r"^(?:\[[^\]]*\] *|\d\. *|[a-z]+\. +)+", "", document.paragraphs[0])
        if answer := answer_from(SENTENCE.findall(definition), rng):
            yield render([("user", rng.choice(DEFINE).format(term)), ("assistant", answer)])
        return
    share = 0.6 if document.manner in FICTION else 0.2
    for paragraph in document.paragraphs:
        sentences = SENTENCE.findall(re.sub(r"^Verses? [\d, -]+\. *", "", paragraph))
        if len(sentences) < 2 or rng.random() > share:
            continue
        turns = [("system", rng.choice(SYSTEM))] if rng.random() < 0.2 else []
        question, used = question_for(document, sentences, rng)
        while answer := answer_from(sentences[used:], rng):
            turns += [("user", question), ("assistant", answer)]
            used += len(SENTENCE.findall(answer))
            question = rng.choice(GO_ON)
            if rng.random() < 0.6:
                break
        if turns and turns[-1][0] == "assistant":
            yield render(turns)
