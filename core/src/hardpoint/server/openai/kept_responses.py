"""Responses that are kept: what a request goes on from, what is made in the background, and the paths of both."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from hardpoint.server.errors import ApiError, JsonResponse, as_api_error
from hardpoint.server.event_log import EventLog
from hardpoint.server.gate import OWNER
from hardpoint.server.openai.responses_input import InputItem, as_items
from hardpoint.server.peers import EndResponse, ReadEvents
from hardpoint.server.response_store import OPEN, MissingResponseError, ResponseStore, StoredResponse
from hardpoint.server.service import Service, ServiceOf
from hardpoint.server.watched import EventStream, named_event

logger = logging.getLogger(__name__)
router = APIRouter(tags=["OpenAI"])

_PREFIXES = {"message": "msg", "reasoning": "rs", "mcp_list_tools": "mcpl", "mcp_approval_response": "mcpa"}
"""Prefixes of the ids of items that need none in a request; others are calls."""
_PAUSE_SECONDS = 0.1
"""How long a stream waits where no process says that it makes the response."""
_CLOSED = "this server keeps no responses; start it without --response-store-bytes 0"


class Keeper:
    """Keeps the response of one request in ``store``; None: it is not kept."""

    def __init__(
        self, store: ResponseStore | None, owner: str, own: list[dict[str, Any]], previous: str | None
    ) -> None:
        """``own``: the items of the request itself; ``previous``: the id of the response that it goes on from."""
        self._store, self._owner, self._own, self._previous = store, owner, own, previous

    @classmethod
    def of(
        cls, request: Request, service: Service, given: str | Sequence[InputItem], previous: str | None, *, store: bool
    ) -> Keeper:
        """The keeper of ``request``, whose input is ``given``."""
        kept = service.store if store else None
        own = [] if kept is None else _as_items(given)
        return cls(kept, str(request.scope[OWNER]), own, previous)

    @property
    def keeps(self) -> bool:
        """Whether the response is kept."""
        return self._store is not None

    async def keep(self, response: dict[str, Any], log: EventLog | None = None) -> None:
        """Keep ``response``, in place of what was kept under its id, with the events of its stream."""
        if self._store is not None:
            stored, events = StoredResponse(response, self._own, self._previous), None if log is None else log.events
            await asyncio.to_thread(self._store.put, self._owner, stored, events)

    async def in_background(
        self,
        service: Service,
        begun: dict[str, Any],
        make: Callable[[], Awaitable[dict[str, Any]]],
        stream: BackgroundStream | None = None,
    ) -> None:
        """Have ``make`` make the response, as which ``begun`` is kept meanwhile, and return at once.

        ``stream``: where it writes the response's events.
        """
        log = None if stream is None else stream.log
        await self.keep(begun | {"status": "in_progress"}, log)
        has_started = asyncio.Event()  # a task that is cancelled before does nothing at all

        async def run() -> None:
            service.open.begin()
            has_started.set()
            try:
                await self.keep(await make(), log)
            except asyncio.CancelledError:
                await end_with({"status": "cancelled"})
            except Exception as error:
                known = as_api_error(error)
                told = {"code": known.code or "server_error", "message": known.message}
                await end_with({"status": "failed", "error": told})
            finally:
                service.open.end()
                del service.background[key]
                if log is not None:
                    log.complete()
                    del service.event_logs[key]

        async def end_with(changes: dict[str, Any]) -> None:
            if stream is not None:
                stream.end(begun | changes)
            await self.keep(begun | changes, log)

        key = (self._owner, str(begun["id"]))
        if log is not None:
            service.event_logs[key] = log
        service.background[key] = asyncio.create_task(run())
        await has_started.wait()


class BackgroundStream(Protocol):
    """The events of a response that is made in the background."""

    log: EventLog

    def end(self, response: dict[str, Any]) -> None:
        """Write the last event of a response that was not completed."""
        ...


async def history(request: Request, service: Service, response_id: str | None) -> list[InputItem]:
    """The items of a conversation up to the response ``response_id``; none where that is None. Raises ApiError 400."""
    if response_id is None:
        return []
    if service.store is None:
        raise ApiError(400, f"previous_response_id: {_CLOSED}, or send all as input", param="previous_response_id")
    try:
        chain = await asyncio.to_thread(service.store.conversation, str(request.scope[OWNER]), response_id)
    except MissingResponseError as missing:
        raise ApiError(
            400,
            f"previous_response_id: the response {str(missing)!r:.200} is not kept, or not any more; send the whole "
            "conversation as input",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None
    if chain[-1].is_open:
        raise ApiError(400, "previous_response_id: the response is not complete yet", param="previous_response_id")
    items = [item for stored in chain for item in (*stored.input, *stored.response["output"])]
    return as_items(items)


@router.get("/v1/responses/{response_id}")
async def retrieve(
    response_id: str,
    request: Request,
    service: ServiceOf,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """A response that is kept, as it is now; with ``stream`` its events with numbers above ``starting_after``."""
    stored = await _stored(response_id, request, service)
    if not stream:
        return JsonResponse(stored.response)
    assert service.store is not None
    owner = str(request.scope[OWNER])
    if await asyncio.to_thread(service.store.events, owner, response_id) is None:
        await _stored(response_id, request, service)  # it may have been deleted meanwhile
        raise ApiError(
            400, "stream: the response was not made with background and stream; leave it out", param="stream"
        )
    return EventStream(request, _events(service, service.store, owner, response_id, starting_after + 1), error_event)


async def _events(
    service: Service, store: ResponseStore, owner: str, response_id: str, begin: int
) -> AsyncGenerator[bytes, None]:
    """The events of a response from number ``begin`` on, whichever process makes it. They end where it is deleted."""
    while True:
        if (log := service.event_logs.get((owner, response_id))) is not None:
            async for written in log.follow(begin):
                yield written
            return
        try:
            response = (await asyncio.to_thread(store.get, owner, response_id)).response
        except MissingResponseError:
            return
        if response["status"] not in OPEN:
            break
        answers = await service.ask(ReadEvents(owner, response_id, begin))
        events = next((answer for answer in answers if answer is not None), None)
        if events:
            begin += len(events)
            yield "".join(events).encode()
        elif events is None:  # it ends at this moment, or the process that makes it does not answer
            await asyncio.sleep(_PAUSE_SECONDS)
    kept = await asyncio.to_thread(store.events, owner, response_id)
    if kept:
        yield "".join(kept[begin:]).encode()
    else:  # the process that made it has ended
        yield last_event(response, begin)


def last_event(response: dict[str, Any], number: int) -> bytes:
    """The event that ends the stream of ``response``. One that was cancelled counts as failed: it has no event."""
    kind = response["status"] if response["status"] in ("completed", "incomplete") else "failed"
    return named_event({"type": f"response.{kind}", "sequence_number": number, "response": response})


def error_event(error: dict[str, Any], number: int = 0) -> bytes:
    """The event of a failure of the stream itself."""
    said = error["error"]
    told = {"code": said["code"], "message": said["message"], "param": said["param"]}
    return named_event({"type": "error", "sequence_number": number} | told)


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    response_id: str,
    request: Request,
    service: ServiceOf,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
    after: Annotated[str | None, Query()] = None,
) -> JsonResponse:
    """The items of the request that a response answers, without those of responses before it."""
    stored = await _stored(response_id, request, service)
    items = stored.input if order == "asc" else stored.input[::-1]
    if after is not None:
        places = [number for number, item in enumerate(items, 1) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after: the request has no item {after!r:.80}", param="after")
        items = items[places[0] :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JsonResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, request: Request, service: ServiceOf) -> JsonResponse:
    """Forget a response; one that is being made ends."""
    stored = await _stored(response_id, request, service)
    await service.ask(EndResponse(str(request.scope[OWNER]), stored.response_id))
    assert service.store is not None
    await asyncio.to_thread(service.store.delete, str(request.scope[OWNER]), response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(response_id: str, request: Request, service: ServiceOf) -> JsonResponse:
    """End a response that is being made in the background."""
    stored = await _stored(response_id, request, service)
    if not stored.response["background"]:
        raise ApiError(400, "a response that was not asked for with background: true cannot be cancelled")
    await service.ask(EndResponse(str(request.scope[OWNER]), stored.response_id))
    return JsonResponse((await _stored(response_id, request, service)).response)


async def _stored(response_id: str, request: Request, service: Service) -> StoredResponse:
    """The kept response of this id. Raises ApiError 404."""
    if service.store is None:
        raise ApiError(404, _CLOSED)
    try:
        return await asyncio.to_thread(service.store.get, str(request.scope[OWNER]), response_id)
    except MissingResponseError:
        raise ApiError(404, f"the response {response_id!r:.200} is not kept, or not any more") from None


def _as_items(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The input of a request as items with ids."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "id": _new_id("msg"), "role": "user", "status": "completed", "content": content}]
    return [_as_item(item) for item in given]


def _as_item(item: InputItem) -> dict[str, Any]:
    plain = item.model_dump(exclude_none=True)
    plain.setdefault("id", _new_id(_PREFIXES.get(item.type, "fc")))
    if isinstance(plain.get("content"), str):
        kind = "output_text" if plain.get("role") == "assistant" else "input_text"
        plain["content"] = [{"type": kind, "text": plain["content"]}]
    return plain


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
