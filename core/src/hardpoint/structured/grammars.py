"""From a StructuredOutput to a matcher over a model's tokens."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from hardpoint.structured.schemas import guided
from hardpoint.structured.state import StructureState
from hardpoint.structured.structural_tags import grammar_of_format, quoted
from hardpoint_plugin_api import RequestError, StructuredOutput

if TYPE_CHECKING:
    import llguidance

    from hardpoint.tokenizer import Tokenizer

NICE = 5
"""How much lower the priority of what compiles is than that of what decodes."""
CACHE_BYTES = 2**29
"""Memory that compiled constraints which no request uses may come to."""
_MAX_CHARACTERS = 2**18
"""Longest schema, pattern or grammar."""
_MAX_LEXER_STATES = 50_000
_STATE_BYTES = 512
_CHARACTER_BYTES = 64
"""Measured for llguidance 1.9.1: 0.3 to 0.5 KiB for each state of a lexer, up to 50 bytes for each character."""


class Grammars:
    """Compiles constraints for one model, and keeps the newest. Several threads may use it.

    ``vocab_size`` is the width of the model's logits; tokens that the tokenizer does not have are never allowed.
    """

    def __init__(
        self, tokenizer_json: str, eos_token_id: int | None, vocab_size: int, cache_bytes: int = CACHE_BYTES
    ) -> None:
        """``tokenizer_json`` is the tokenizer as the ``tokenizers`` library writes it.

        Kept grammars take ``cache_bytes`` at most, each counted with the size to which its lexer may grow.
        """
        self.vocab_size = vocab_size
        self._json, self._eos = tokenizer_json, eos_token_id or 0
        self._cache: OrderedDict[StructuredOutput, llguidance.LLMatcher] = OrderedDict()
        self._cache_bytes, self._cached_bytes = cache_bytes, 0
        self._tokens: llguidance.LLTokenizer | None = None
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Grammars:
        """Grammars over the tokens of ``tokenizer``."""
        return cls(tokenizer.backend.to_str(), tokenizer.eos_token_id, vocab_size)

    def start(self, structure: StructuredOutput, ends: frozenset[int] = frozenset()) -> StructureState:
        """Follow a new output, which the tokens ``ends`` may end where the constraint is met.

        Raises RequestError for what cannot be compiled, or by no token of the model, or at too much cost.
        """
        own = self._cached(structure)
        if own is None:
            with self._compiling:
                tokens = self._tokenizer()
                own = self._cached(structure)  # another thread may have compiled it meanwhile
                if own is None:
                    compiled = _compiled(structure, tokens)
                    own = compiled.deep_copy()
                    self._keep(structure, compiled)
        tokens = self._tokenizer()
        opening = self._opening(structure, tokens)
        state = StructureState(own, tokens, self.vocab_size, self._eos, ends, structure.after, opening)
        if state.error or state.is_complete:
            reason = state.error or "it allows the empty text alone"
            raise _refused(structure, reason)
        return state

    def is_compiled(self, structure: StructuredOutput) -> bool:
        """Whether ``start`` would compile nothing."""
        return self._cached(structure) is not None

    def _cached(self, structure: StructuredOutput) -> llguidance.LLMatcher | None:
        """A copy of the compiled constraint, for one output; None where there is none that works.

        Copies share a lexer, which one of them may have worn out.
        """
        with self._lock:
            matcher = self._cache.get(structure)
            if matcher is None:
                return None
            self._cache.move_to_end(structure)
            own = matcher.deep_copy()
        return None if own.is_error() else own

    def _keep(self, structure: StructuredOutput, matcher: llguidance.LLMatcher) -> None:
        with self._lock:
            if structure not in self._cache:
                self._cached_bytes += _most_bytes(structure)
            self._cache[structure] = matcher
            self._cache.move_to_end(structure)
            while self._cached_bytes > self._cache_bytes:
                self._cached_bytes -= _most_bytes(self._cache.popitem(last=False)[0])

    def _tokenizer(self) -> llguidance.LLTokenizer:
        if self._tokens is None:
            import llguidance

            try:
                self._tokens = llguidance.LLTokenizer(self._json, n_vocab=self.vocab_size, eos_token=self._eos)
            except Exception as error:  # the library raises whatever its Rust side says
                raise RequestError(
                    f"structured output is not possible with this model's tokenizer: {_short(str(error))}"
                ) from error
        return self._tokens

    def _opening(self, structure: StructuredOutput, tokens: llguidance.LLTokenizer) -> int | None:
        if not structure.opening:
            return None
        found = tokens.tokenize_str(structure.opening, parse_special=True)
        if len(found) != 1:
            raise _refused(structure, f"its opening {structure.opening!r} is not one token of the model's")
        return found[0]


def _compiled(structure: StructuredOutput, tokens: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    size = _num_characters(structure)
    if size > _MAX_CHARACTERS:
        raise _refused(structure, f"it has {size} characters, at most {_MAX_CHARACTERS} are taken")
    limits = LLParserLimits(step_lexer_fuel=50_000, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokens, _grammar(structure, tokens), log_level=0, limits=limits)
    except MemoryError:  # the limit of the process that tries constraints, which has its own error
        raise
    except Exception as error:  # ValueError for malformed JSON, and whatever the Rust side says
        raise _refused(structure, str(error)) from error
    if matcher.is_error():
        raise _refused(structure, matcher.get_error())
    return matcher


def _num_characters(structure: StructuredOutput) -> int:
    return len(structure.value) + sum(map(len, structure.choices))


def _most_bytes(structure: StructuredOutput) -> int:
    """The memory that a compiled constraint may come to, in bytes."""
    return _num_characters(structure) * _CHARACTER_BYTES + _MAX_LEXER_STATES * _STATE_BYTES


def _grammar(structure: StructuredOutput, tokens: llguidance.LLTokenizer) -> str:
    from llguidance import LLMatcher, grammar_from

    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(structure.value)
    if structure.kind == "grammar":
        return grammar_from("grammar", structure.value)
    if structure.kind == "structural_tag":
        return grammar_of_format(json.loads(structure.value), tokens)
    if structure.kind == "choice":
        texts = " | ".join(map(quoted, structure.choices))
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    schema = json.loads(structure.value) if structure.kind == "json_schema" else {"type": "object"}
    return LLMatcher.grammar_from_json_schema(guided(schema))


def _refused(structure: StructuredOutput, reason: str) -> RequestError:
    return RequestError(f"structured output: this {structure.kind} cannot be used: {_short(reason)}")


def _short(reason: str) -> str:
    """The library's words on one line, without its positions in the grammar that it made."""
    if reason in ("NoExtension", "NoExtensionBias"):
        return "no text satisfies it"
    text = " ".join(reason.replace("<non-verbose/>", "").split(" 1 | start:")[0].split())
    return text if len(text) <= 300 else f"{text[:300]}..."
