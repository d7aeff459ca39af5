"""Chats by mistral-common, Mistral AI's own library, for its tokenizers, which come without a template."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from hardpoint.checkpoint.tekken import TEKKEN
from hardpoint.tokenizer.chat import ChatTemplate, Message, checked_messages
from hardpoint_plugin_api import CheckpointError, RequestError

_TEXTS = ("text", "thinking")
"""Types of parts that hold text. mistral-common opens addresses and files that other parts name."""


def load_chat_template(folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The chat template of the tokenizer at ``folder``: mistral-common where that is a tekken.json and the library is
    installed, otherwise Jinja's. Raises CheckpointError for unreadable files.
    """
    if folder.name == TEKKEN and importlib.util.find_spec("mistral_common") is not None:
        return MistralChat(folder, special_tokens)
    template = ChatTemplate.load(folder, special_tokens)
    if folder.name == TEKKEN and not template.text:
        return NoMistralChat(folder, special_tokens)
    return template


class MistralChat(ChatTemplate):
    """Renders chats as the model of the tokenizer ``file`` was trained on them."""

    def __init__(self, file: Path, special_tokens: Mapping[str, str]) -> None:
        super().__init__({"default": "{# mistral-common renders chats, with tools as [TOOL_CALLS] #}"}, special_tokens)
        self._file = file

    @cached_property
    def _library(self) -> Any:
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        try:
            return MistralTokenizer.from_file(str(self._file))
        except (MistralCommonException, ValueError, AssertionError) as error:
            raise CheckpointError(f"{self._file}: mistral-common does not read it: {error}") from error

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
        """Return the prompt for ``messages``; see ChatTemplate.render. ``variables`` are fields of mistral-common's
        request, such as ``reasoning_effort``. There is one template. Raises RequestError for parts of a message that
        are no text, too.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError("add_generation_prompt and continue_final_message exclude each other; set one")
        if template not in (None, "default"):
            raise RequestError(f"chat template {template!r} is not known: mistral-common has one, 'default'")
        chat = _of_text(messages)

        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        library = self._library
        try:
            request = ChatCompletionRequest.from_openai(
                messages=chat,
                tools=None if tools is None else [dict(tool) for tool in tools],
                continue_final_message=continue_final_message,
                **variables,
            )
            ids = library.encode_chat_completion(request).tokens
            return str(library.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP))
        except Exception as error:  # of its own, of pydantic, and whatever malformed messages make of it
            raise RequestError(f"mistral-common refuses the messages: {type(error).__name__}: {error}") from error


def _of_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as mistral-common takes them. Raises RequestError for malformed ones, and for parts that are no text."""
    chat = checked_messages(messages)
    for number, message in enumerate(chat):
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if part["type"] not in _TEXTS:
                raise RequestError(
                    f"messages[{number}] holds a part of type {part['type']!r:.80}; text alone is read, in parts of "
                    f"type {' or '.join(map(repr, _TEXTS))}"
                )
        message.pop("thinking", None)  # its 'reasoning_content' says the same
    return chat


class NoMistralChat(ChatTemplate):
    """Stands for a chat template that nothing here can make."""

    def __init__(self, file: Path, special_tokens: Mapping[str, str]) -> None:
        super().__init__({}, special_tokens)
        self._file = file

    def render(self, messages: Sequence[Message], **options: Any) -> NoReturn:
        """Raises RequestError."""
        raise RequestError(
            f"{self._file} comes without a chat template: pip install 'hardpoint-core[mistral]', which brings "
            "mistral-common, or name a template by --chat-template"
        )
