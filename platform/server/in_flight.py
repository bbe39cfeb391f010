"""The requests that wait for events of the engine, and what each was told so far."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from plait.platform.core import Event, Request
from plait.platform.errors import BadRequest, PlaitError, by_code


@dataclass(slots=True)
class InFlight:
    """A request that waits for events; owned by whoever opened it."""

    num_remaining: int  # sequences without their last event
    queue: asyncio.Queue[Event | PlaitError] = field(default_factory=asyncio.Queue)

    async def next(self) -> Event:
        """The next event, while some remain. Raises what ends the request as a whole."""
        event = await self.queue.get()
        if isinstance(event, PlaitError):
            self.num_remaining = 0
            raise event
        if event.finish_reason is not None:
            self.num_remaining -= 1
        if event.error is not None:  # ends the request: the other answers are to be aborted
            raise by_code(event.error[0])(event.error[1])
        return event


class InFlightRequests:
    """All requests that the engine works on, by id. Belongs to the event loop."""

    def __init__(self) -> None:
        self._requests: dict[str, InFlight] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Those that are open."""
        return tuple(self._requests)

    def open(self, request: Request) -> InFlight:
        """Wait for the events of a request, until `close`. Raises `BadRequest`: its id is used."""
        if request.request_id in self._requests:
            raise BadRequest(
                f"request id {request.request_id} is already in flight", param="request_id"
            )
        entry = self._requests[request.request_id] = InFlight(request.params.n)
        return entry

    def close(self, request_id: str) -> None:
        """Wait no longer; further events of it are dropped."""
        del self._requests[request_id]

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand events to those that wait for them."""
        for event in events:
            entry = self._requests.get(event.request_id)
            if entry is not None:
                entry.queue.put_nowait(event)

    def fail(self, error: PlaitError) -> None:
        """End all of them."""
        for entry in self._requests.values():
            entry.queue.put_nowait(error)
