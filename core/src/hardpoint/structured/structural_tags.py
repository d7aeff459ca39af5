"""Structural tags: from a tree of formats, as xgrammar and vLLM write it, to a grammar for llguidance.

A format is open where free text may stand at its end (``any_text``, ``triggered_tags``, ``dispatch``). Free text ends
with a known text: the end of the tag around it, or the text that follows it in a sequence. So an open format is
compiled together with the texts that may end it; without any, it lasts to the end of the output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hardpoint.structured.schemas import guided

if TYPE_CHECKING:
    import llguidance

Format = Mapping[str, Any]
Ends = Sequence[str]
"""Texts of which one must follow."""

_TEXT = "(?s:.*)"
_MAX_CHARACTERS = 2**20
"""Of all literals: an end is written once for each format that it may follow."""
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}


def grammar_of_format(form: object, tokens: llguidance.LLTokenizer) -> str:
    """The grammar of ``form``. Special tokens in its texts stand for themselves.

    Raises ValueError, which names the place, for what is no format or not supported.
    """
    rules = _Rules(tokens)
    start = rules.of(form, (), "format")
    return rules.written(start)


class _Rules:
    """The rules of one grammar in the making. Methods return expressions, each of which may be part of another."""

    def __init__(self, tokens: llguidance.LLTokenizer) -> None:
        self._tokens = tokens
        self._lines: list[str] = []
        self._texts: dict[tuple[str, ...], str] = {}
        self._grammars: list[dict[str, str]] = []
        self._num_characters = 0

    def written(self, start: str) -> str:
        """The grammar whose rule ``start`` is this expression."""
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._lines])
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._grammars]})

    def of(self, form: object, ends: Ends, at: str) -> str:
        """``form``, followed by one of ``ends`` where there are some."""
        kind = _kind(form, at)
        assert isinstance(form, Mapping)
        if kind == "any_text":
            return self._until(ends, self._text(form, at))
        if kind in ("triggered_tags", "dispatch"):
            return self._triggered(form, kind, ends, at)
        if kind == "sequence":
            return self._sequence(_formats(form, "elements", at), ends, at)
        if kind == "or":
            each = (
                self.of(one, ends, where) for one, where in _placed(_formats(form, "elements", at), f"{at}.elements")
            )
            return self._rule(" | ".join(each))
        if kind == "tag":
            return self._tag(form, ends, at)
        if kind == "optional" and _is_open(form.get("content")):
            return self._rule(f"{self.of(form['content'], ends, f'{at}.content')} | {self._one_of(ends) or _EMPTY}")
        return f"{self._closed(form, kind, at)} {self._one_of(ends)}"

    def _closed(self, form: Format, kind: str, at: str) -> str:
        """A format of which nothing is open."""
        if kind == "const_string":
            return self._literal(_string(form, "value", at))
        if kind == "json_schema":
            if form.get("style", "json") != "json":
                raise ValueError(
                    f"{at}: the style {form['style']!r} is not supported; leave it out, or write a grammar"
                )
            if "json_schema" not in form:
                raise ValueError(f"{at}: json_schema is missing")
            return f"%json {guided(form['json_schema'])}"
        if kind == "regex":
            return self._rule(f"/{_slashed(_string(form, 'pattern', at))}/")
        if kind == "grammar":
            return self._grammar(_string(form, "grammar", at))
        if kind == "token":
            return self._token(form, at)
        if kind == "tags_with_separator":
            return self._separated(form, at)
        content = self.of(form.get("content"), (), f"{at}.content")
        if _is_open(form.get("content")):
            raise ValueError(f"{at}: free text cannot be repeated, since nothing ends it; put a tag around it")
        if kind == "repeat":
            low, high = form.get("min"), form.get("max")
            if type(low) is not int or type(high) is not int or not (low >= 0 and (low <= high or high == -1)):
                raise ValueError(f"{at}: min and max are whole numbers, min at most max, and -1 for no maximum")
            return f"({content}){{{low},{'' if high == -1 else high}}}"
        return f"({content}){_REPEATS[kind]}"

    def _sequence(self, elements: Sequence[object], ends: Ends, at: str) -> str:
        parts, begun = [], False
        for number, (element, where) in enumerate(_placed(elements, f"{at}.elements")):
            form = _without_lead(element) if begun else element
            begun = False
            if number + 1 == len(elements):
                parts.append(self.of(form, ends, where))
            elif _is_open(form):
                following = _lead(elements[number + 1])
                if following is None:
                    raise ValueError(f"{where}: free text must stand last, or before a const_string or a tag")
                parts.append(self.of(form, [following], where))
                begun = True
            else:
                parts.append(self.of(form, (), where))
        return " ".join(parts)

    def _tag(self, form: Format, ends: Ends, at: str) -> str:
        begin, own = form.get("begin"), form.get("end")
        if isinstance(begin, Mapping) or isinstance(own, Mapping):
            begin, own = (self._token_text(each, at) for each in (begin, own))
        texts = [own] if isinstance(own, str) else own
        if not isinstance(begin, str) or not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"{at}: a tag has the text begin, and the text end or a list of texts")
        closing = [text for text in texts if text]
        if closing and len(closing) < len(texts):
            raise ValueError(f"{at}: one of the ends is empty, and others are not")
        if closing:
            inner = self.of(form.get("content"), closing, f"{at}.content")
            return f"{self._literal(begin)} {inner} {self._one_of(ends)}"
        return f"{self._literal(begin)} {self.of(form.get('content'), ends, f'{at}.content')}"

    def _triggered(self, form: Format, kind: str, ends: Ends, at: str) -> str:
        """Free text in which triggers begin structures: (trigger, the rest of the structure)."""
        text = self._text(form, at)
        pairs = list(self._structures(form, at) if kind == "triggered_tags" else self._dispatched(form, at))
        if not pairs:
            raise ValueError(f"{at}: there is no structure to begin")
        each = self._rule(" | ".join(f"{self._until([trigger], text)} {rest}" for trigger, rest in pairs))
        rest = self._until(ends, text)
        stops = form.get("stop_after_first", False) if kind == "triggered_tags" else not form.get("loop", True)
        if form.get("at_least_one", False):
            first = self._rule(" | ".join(f"{self._literal(trigger)} {rest}" for trigger, rest in pairs))
            return f"{first} {self._one_of(ends)}" if stops else f"{first} ({each})* {rest}"
        return self._rule(f"{each} {self._one_of(ends)} | {rest}") if stops else f"({each})* {rest}"

    def _structures(self, form: Format, at: str) -> Iterator[tuple[str, str]]:
        triggers = form.get("triggers")
        if not isinstance(triggers, list) or not all(isinstance(each, str) and each for each in triggers):
            raise ValueError(f"{at}: triggers is a list of texts")
        for tag, where in _placed(_formats(form, "tags", at), f"{at}.tags"):
            lead = _lead(tag)
            if _kind(tag, where) != "tag" or lead is None:
                raise ValueError(f"{where}: triggers begin tags whose begin is a text")
            trigger = max((each for each in triggers if lead.startswith(each)), key=len, default=None)
            if trigger is None:
                raise ValueError(f"{where}: no trigger begins {lead!r:.80}")
            if _is_open(tag):
                raise ValueError(f"{where}: a tag with free text needs an end")
            yield trigger, self._rule(self.of(_without_lead(tag, len(trigger)), (), where))

    def _dispatched(self, form: Format, at: str) -> Iterator[tuple[str, str]]:
        rules = form.get("rules")
        if not isinstance(rules, list):
            raise ValueError(f"{at}: rules must be a list of [text, format] pairs, got {rules!r:.80}")
        for rule, where in _placed(rules, f"{at}.rules"):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise ValueError(
                    f"{where}: a rule must be a pair [text, format] with a text that is not empty, got {rule!r:.80}"
                )
            if _is_open(rule[1]):
                raise ValueError(f"{where}: free text here has no end; put a tag around it")
            yield rule[0], self._rule(self.of(rule[1], (), f"{where}[1]"))

    def _separated(self, form: Format, at: str) -> str:
        tags = [self.of(tag, (), where) for tag, where in _placed(_formats(form, "tags", at), f"{at}.tags")]
        if any(map(_is_open, form["tags"])):
            raise ValueError(f"{at}: a tag with free text needs an end")
        each = self._rule(" | ".join(tags))
        more = (
            "" if form.get("stop_after_first", False) else f"({self._literal(_string(form, 'separator', at))} {each})*"
        )
        whole = f"{each} {more}"
        return whole if form.get("at_least_one", False) else f"({whole})?"

    def _text(self, form: Format, at: str) -> str:
        """The terminal of free text without the texts that are excluded."""
        excludes = form.get("excludes", [])
        if not isinstance(excludes, list) or not all(isinstance(each, str) and each for each in excludes):
            raise ValueError(f"{at}: excludes is a list of texts")
        name = self._texts.get(tuple(excludes))
        if name is None:
            name = self._texts[tuple(excludes)] = f"TEXT_{len(self._texts)}"
            without = "".join(f" & ~/{_TEXT}{_slashed(_META.sub(_ESCAPED, each))}{_TEXT}/" for each in excludes)
            self._lines.append(f"{name}: /{_TEXT}/{without}")
        return name

    def _until(self, ends: Ends, text: str) -> str:
        """Free text up to and including the first of ``ends``; without any, to the end of the output."""
        if not ends:
            return self._rule(text)
        options = []
        for end in ends:
            first, *others = self._pieces(end)
            # A special token is no text, so that it ends text by itself; another end is the first that appears.
            options.append(f"{text} {first}" if first.startswith("<") else self._rule(f"{text} {first}", "[lazy]"))
            options[-1] = " ".join([options[-1], *others])
        return self._rule(" | ".join(options))

    def _one_of(self, texts: Ends) -> str:
        each = [self._literal(text) for text in texts]
        return each[0] if len(each) == 1 else f"({' | '.join(each)})" if each else ""

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text)) or _EMPTY

    def _pieces(self, text: str) -> list[str]:
        """``text`` as literals, and special tokens between them."""
        self._num_characters += len(text)
        if self._num_characters > _MAX_CHARACTERS:
            raise ValueError(f"its texts come to more than {_MAX_CHARACTERS} characters")
        pieces, plain = [], b""
        for token in self._tokens.tokenize_str(text, parse_special=True) if text else ():
            if token == self._tokens.eos_token:
                raise ValueError(f"{text!r:.80} holds the token that ends outputs, which is no part of a format")
            if not self._tokens.is_special_token(token):
                plain += self._tokens.decode_bytes([token])
                continue
            if plain:
                pieces.append(quoted(plain.decode()))
            pieces, plain = [*pieces, f"<[{token}]>"], b""
        return [*pieces, quoted(plain.decode())] if plain else pieces

    def _token(self, form: Format, at: str) -> str:
        token = form.get("token")
        if type(token) is not int:
            return self._literal(self._token_text(form, at))
        if not 0 <= token < self._tokens.vocab_size or token == self._tokens.eos_token:
            raise ValueError(f"{at}: {token} is no token of this model, or the one that ends outputs")
        return f"<[{token}]>"

    def _token_text(self, form: object, at: str) -> str:
        """The text of a special token, for a tag that begins or ends with one."""
        if isinstance(form, str):
            return form
        text = form.get("token") if isinstance(form, Mapping) and form.get("type") == "token" else None
        if not isinstance(text, str) or [piece[:1] for piece in self._pieces(text)] != ["<"]:
            raise ValueError(f"{at}: {text!r:.80} is not the text of one special token of this model")
        return text

    def _grammar(self, text: str) -> str:
        import llguidance

        name = f"grammar_{len(self._grammars)}"
        own = llguidance.grammar_from("grammar", text)
        self._grammars.append({"name": name, "lark_grammar": own})
        return f"@{name}"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name


_EMPTY = '""'
_ESCAPED = r"\\\g<0>"
_KINDS = frozenset(
    {"any_text", "const_string", "json_schema", "regex", "grammar", "token", "sequence", "or", "tag", "triggered_tags"}
    | {"tags_with_separator", "dispatch", "repeat", *_REPEATS}
)


def _kind(form: object, at: str) -> str:
    kind = form.get("type") if isinstance(form, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{at}: must be an object whose type is one of {', '.join(sorted(_KINDS))}, got {form!r:.80}")
    return kind


def _is_open(form: object) -> bool:
    """True where free text may follow its end."""
    if not isinstance(form, Mapping):
        return False
    kind, elements = form.get("type"), form.get("elements")
    if kind in ("any_text", "triggered_tags", "dispatch"):
        return True
    if kind == "sequence":
        return isinstance(elements, list) and bool(elements) and _is_open(elements[-1])
    if kind == "or":
        return isinstance(elements, list) and any(map(_is_open, elements))
    return _is_open(form.get("content")) and (kind == "optional" or (kind == "tag" and form.get("end") in ("", [""])))


def _lead(form: object) -> str | None:
    """The text that ``form`` begins with, where it always does."""
    if isinstance(form, Mapping) and form.get("type") in ("const_string", "tag"):
        text = form.get("value" if form["type"] == "const_string" else "begin")
        return text if isinstance(text, str) and text else None
    return None


def _without_lead(form: object, count: int | None = None) -> Format:
    """``form`` without the first ``count`` characters of its lead; None: without all of it."""
    assert isinstance(form, Mapping)
    key = "value" if form["type"] == "const_string" else "begin"
    return {**form, key: "" if count is None else form[key][count:]}


def _formats(form: Format, key: str, at: str) -> list[object]:
    found = form.get(key)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{at}: {key} is a list of formats, and not empty")
    return found


def _placed(found: Sequence[Any], at: str) -> Iterator[tuple[Any, str]]:
    return ((each, f"{at}[{number}]") for number, each in enumerate(found))


def _string(form: Format, key: str, at: str) -> str:
    if not isinstance(form.get(key), str):
        raise ValueError(f"{at}: {key} is a text, got {form.get(key)!r:.80}")
    return str(form[key])


def _slashed(pattern: str) -> str:
    """``pattern`` between the slashes of the grammar: those of its own are escaped."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")


def quoted(text: str) -> str:
    """A literal of the grammar: JSON's, but for a character that it lets stand as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
