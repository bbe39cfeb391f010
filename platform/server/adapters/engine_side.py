"""What the server knows of the engine's adapters, and tells it again when it restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from msgspec import structs

from plait.adapters.info import AdapterInfo, AdapterState
from plait.platform.errors import AdapterError, InternalError, PlaitError, by_code
from plait.platform.messages import (
    AdapterLoaded,
    AdapterStates,
    DropAdapter,
    LoadAdapter,
    PinAdapter,
    ToEngine,
)

log = logging.getLogger(__name__)


class EngineAdapters:
    """Generations that the engine has been asked to keep. All calls run on the event loop."""

    def __init__(self, send: Callable[[ToEngine], Awaitable[None]]) -> None:
        self._send = send
        self._live: dict[str, LoadAdapter] = {}  # loaded: an engine that restarts gets them again
        self._infos: dict[str, AdapterInfo] = {}
        self._loading: dict[str, asyncio.Future[AdapterInfo]] = {}
        self._awaited: set[str] = set()  # sent again, not yet answered
        self.states: Mapping[str, AdapterState] = {}

    async def load(self, message: LoadAdapter) -> AdapterInfo:
        """Have it loaded; see `EngineClient.load_adapter`. Equal loads at a time are one."""
        generation = message.generation
        known = self._infos.get(generation)
        if known is not None:
            await self.pin(generation, pinned=message.pinned or self._live[generation].pinned)
            return known
        future = self._loading.get(generation)
        if future is not None:
            return await asyncio.shield(future)
        future = self._loading[generation] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # none may await it
        try:
            await self._send(message)
            info = await asyncio.shield(future)
        except PlaitError as error:
            if not future.done():
                future.set_exception(error)
            raise
        finally:
            self._loading.pop(generation, None)
        self._live[generation], self._infos[generation] = message, info
        return info

    async def pin(self, generation: str, *, pinned: bool) -> None:
        """See `EngineClient.pin_adapter`."""
        live = self._live.get(generation)
        if live is not None and live.pinned != pinned:
            self._live[generation] = structs.replace(live, pinned=pinned)
            await self._send(PinAdapter(generation=generation, pinned=pinned))

    async def drop(self, generation: str) -> None:
        """See `EngineClient.drop_adapter`."""
        self._live.pop(generation, None)
        self._infos.pop(generation, None)
        self._awaited.discard(generation)
        await self._send(DropAdapter(generation=generation))

    def take(self, message: AdapterLoaded | AdapterStates) -> None:
        """What the engine told."""
        if isinstance(message, AdapterStates):
            self.states = message.states
            return
        generation = message.generation
        self._awaited.discard(generation)
        future = self._loading.get(generation)
        if future is None:
            if message.error is not None:
                log.error("adapter %s is gone: %s", generation[:12], message.error[1])
        elif not future.done():
            if message.info is not None:
                future.set_result(message.info)
            else:
                future.set_exception(_error_of(message))

    def engine_ended(self, error: PlaitError) -> None:
        """Loads under way fail; what was loaded will be asked for again."""
        self.states = {}
        for future in self._loading.values():
            if not future.done():
                future.set_exception(error)

    async def send_again(self) -> None:
        """Ask a new engine for everything that was loaded."""
        self._awaited = set(self._live)
        for message in list(self._live.values()):
            await self._send(message)

    @property
    def is_restored(self) -> bool:
        """Whether a new engine has answered for everything that was loaded."""
        return not self._awaited


def _error_of(message: AdapterLoaded) -> PlaitError:
    code, text = message.error or (InternalError.code, "the engine could not load this adapter")
    cls = by_code(code)
    if issubclass(cls, AdapterError):
        return cls(text, report=message.report)
    return cls(text)
