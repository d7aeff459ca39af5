"""Chats to prompts: the checkpoint's own Jinja template, rendered in a sandbox as Transformers does.

A template comes with a checkpoint, from anybody: it sees plain JSON values only, and cannot reach Python through them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hardpoint.checkpoint.formats import open_files
from hardpoint_plugin_api import CheckpointError, ConfigError, RequestError, UnknownNameError

Message = Mapping[str, Any]
"""``role``, ``content`` (a text, or a list of parts), and whatever else the template knows, such as ``tool_calls``."""

_CONTINUE = "HARDPOINT_CONTINUES_HERE "
"""Stands at the end of the final message while it is rendered; templates that strip contents strip its blank."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
_ASKS_FOR_NONE = re.compile(r"\bcontent(?:['\"]\s*\])?\s+is\s+(?:not\s+)?none\b", re.IGNORECASE)
"""In a template that expects no content of a call to be null, as DeepSeek's do; for others it is not there at all."""


class ChatTemplate:
    """The templates of one checkpoint by name, most often ``default`` alone.

    ``special_tokens`` are given to the templates as variables (``bos_token`` and so on).
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates, self._special_tokens = dict(templates), dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def text(self) -> str:
        """All templates, one after the other; empty where there is none."""
        return "\n".join(self._templates.values())

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Read the templates of the checkpoint in ``folder``: separate Jinja files, else those in JSON files.

        A checkpoint without any makes an object whose ``render`` refuses. Raises CheckpointError for unreadable files.
        """
        files = open_files(folder)
        named = {Path(name).stem: name for name in files.matching("additional_chat_templates/*.jinja")}
        if files.has("chat_template.jinja"):
            named["default"] = "chat_template.jinja"
        if named:
            return cls({name: str(files.read_text(file)) for name, file in named.items()}, special_tokens)
        for name in ("tokenizer_config.json", "chat_template.json"):
            found = files.read_json(name).get("chat_template")
            if isinstance(found, str):
                return cls({"default": found}, special_tokens)
            if found:
                return cls(_named(found, files.path(name)), special_tokens)
        return cls({}, special_tokens)

    @classmethod
    def of_file(cls, file: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """The template in ``file``, which the user gives in place of a checkpoint's.

        Raises ConfigError where it cannot be read or compiled: before a model is loaded for nothing.
        """
        try:
            text = file.read_text(encoding="utf-8")
            _environment().from_string(text)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
            raise ConfigError(
                f"--chat-template {file} cannot be read: {why}; give a file of a Jinja template"
            ) from None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"--chat-template {file}, line {error.lineno}: it is no Jinja template: {error.message}"
            ) from None
        return cls({"default": text}, special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for ``messages``.

        ``add_generation_prompt`` ends it where the assistant's next message begins; ``continue_final_message`` ends it
        inside the last message, which the model then continues. ``tools`` are JSON schemas. ``template`` names one of
        several. ``variables`` are handed to the template.
        Raises RequestError for invalid messages, and with the template's own words where it refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("add_generation_prompt and continue_final_message exclude each other; set one")
        name = self._choose(template, tools is not None)
        chat = checked_messages(messages)
        final = _mark_final_message(chat) if continue_final_message else ""
        values = {
            "documents": None,
            **self._special_tokens,
            **cast(dict[str, Any], _plain(variables)),
            "messages": chat,
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        if _ASKS_FOR_NONE.search(self._templates[name]):
            chat[:] = [{**m, "content": m.get("content") or None} if m.get("tool_calls") else m for m in chat]
        try:
            text = self._run(name, lambda compiled: compiled.render(values))
        except RequestError as error:
            written = _with_written_arguments(chat)
            if not isinstance(error.__cause__, TypeError) or written == chat:
                raise
            values["messages"] = written  # some templates, DeepSeek's among them, add arguments to texts
            text = self._run(name, lambda compiled: compiled.render(values))
        return _cut_at_mark(text, final) if continue_final_message else text

    def _choose(self, name: str | None, with_tools: bool) -> str:
        if not self._templates:
            raise RequestError(
                "this model has no chat template: it continues text (send a plain prompt), "
                "or its chat_template.jinja is missing from the checkpoint"
            )
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(str(UnknownNameError("chat template", name, self._templates)))
        return name

    def _run(self, name: str, render: Callable[[jinja2.Template], str]) -> str:
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self._templates[name])
            return render(self._compiled[name])
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the model's chat template is malformed, line {error.lineno}: {error.message}"
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise RequestError(f"the model's chat template tried to leave its sandbox: {error}") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # a template can raise anything that its expressions can
            raise RequestError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error


def _with_written_arguments(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``chat`` with the arguments of calls as the text of JSON, in which models write them and clients send them."""

    def written(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping | list):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in chat
    ]


def _named(entries: object, file: Path) -> dict[str, str]:
    try:
        templates = {entry["name"]: entry["template"] for entry in cast(list[dict[str, str]], entries)}
    except (TypeError, KeyError):
        templates = {}
    if not templates or not all(isinstance(text, str) for named in templates.items() for text in named):
        raise CheckpointError(
            f"{file}: 'chat_template' must be a text, or a list of objects with 'name' and 'template'"
        )
    return templates


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of ``messages`` out of plain JSON types, without keys that are None: templates would write them out.

    Reasoning stands in it as ``thinking`` and as ``reasoning_content``. Raises RequestError, naming the message.
    """
    try:
        return _checked(messages)
    except RecursionError:
        raise RequestError("messages are nested too deeply") from None


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not messages:
        raise RequestError(f"messages must be a list of at least one message, got {messages!r:.80}")
    chat = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{number}] must be an object with 'role' and 'content', got {message!r:.80}")
        if not (isinstance(message.get("role"), str) and message["role"]):
            raise RequestError(f"messages[{number}] needs a 'role' such as 'user', got {message.get('role')!r:.80}")
        content = message.get("content")
        if content is None and not any(message.get(key) for key in ("tool_calls", *_REASONING)):
            raise RequestError(f"messages[{number}] (role {message['role']!r}) has no 'content'")
        if not isinstance(content, str | None) and not _is_parts(content):
            raise RequestError(
                f"messages[{number}] 'content' must be a text or a list of objects with a 'type', got {content!r:.80}"
            )
        plain = {key: _plain(value) for key, value in message.items() if value is not None}
        reasoning = next((plain[key] for key in _REASONING if key in plain), None)
        chat.append(
            {"thinking": reasoning, **plain, "reasoning_content": reasoning} if reasoning is not None else plain
        )
    return chat


def _is_parts(content: object) -> bool:
    return isinstance(content, list | tuple) and all(isinstance(p, Mapping) and "type" in p for p in content)


def _plain(value: object) -> object:
    """A copy of ``value`` out of plain JSON types: objects have methods that a sandbox cannot know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration's member: its value
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)
    raise RequestError(f"chat messages hold plain JSON values, got a {type(value).__name__}")


def _mark_final_message(chat: list[dict[str, Any]]) -> str:
    """Put a mark at the end of the last message's text, and return that text."""
    content = chat[-1].get("content")
    holder: dict[str, Any] | None = chat[-1]
    key = "content"
    if isinstance(content, list):
        holder, key = next((part for part in reversed(content) if isinstance(part.get("text"), str)), None), "text"
    if holder is None or not isinstance(holder.get(key), str):
        raise RequestError("continue_final_message needs a last message that holds text")
    final = str(holder[key])
    holder[key] = final + _CONTINUE
    return final


def _cut_at_mark(text: str, final: str) -> str:
    """End ``text`` where the mark stands; blanks at the end of the message stay only if the template keeps them."""
    mark = _CONTINUE.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise RequestError("the model's chat template does not write out the last message, so it cannot be continued")
    kept = text[at : at + len(_CONTINUE)] == _CONTINUE
    return text[:at] if kept else text[:at].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only stands for its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration is a plain set

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace``, closed to names with an underscore in front: attributes of Python, not of a template."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """``dict(...)`` and ``dict.fromkeys(...)``, without the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
