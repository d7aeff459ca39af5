"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from hardpoint.server.errors import ApiError, JsonResponse
from hardpoint.server.fields import ProtocolModel
from hardpoint.server.openai.messages import ChatMessage, Tool, template_messages, template_tools
from hardpoint.server.requests import JsonRoute, checked_template_kwargs
from hardpoint.server.service import ServiceOf

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


class TokenizeRequest(ProtocolModel):
    """A text, or a conversation as the model would get it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ProtocolModel):
    """Token ids."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOf) -> JsonResponse:
    """The tokens of a text or a conversation."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")
    return JsonResponse(await _tokenized(body, service))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceOf) -> JsonResponse:
    """The text of tokens."""
    service.check_model(body.model)
    tokenizer = service.host.engine.tokenizer
    if wrong := next((token for token in body.tokens if not 0 <= token < 2**31), None):
        raise ApiError(400, f"tokens: {wrong} is no token id", param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, bool(body.skip_special_tokens))
    return JsonResponse({"prompt": text})


async def _tokenized(body: TokenizeRequest, service: ServiceOf) -> dict[str, Any]:
    engine = service.host.engine
    if body.messages is None:
        adds = body.add_special_tokens is not False
        ids = await engine.encode(body.prompt or "", add_special_tokens=adds)
    else:
        text = await asyncio.to_thread(
            engine.render_chat,
            template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            **({"tools": template_tools(body.tools)} if body.tools else {}),
            **checked_template_kwargs(body.chat_template_kwargs),
        )
        ids = await engine.encode(text, add_special_tokens=bool(body.add_special_tokens))
    found: dict[str, Any] = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [engine.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return found
