"""What the server knows of the engine's adapters, and tells it again when it restarts."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec import structs

from plait.adapters.info import AdapterInfo, AdapterLevel, AdapterState
from plait.platform.errors import (
    AdapterError,
    AdapterStorageFailed,
    EngineDied,
    InternalError,
    PlaitError,
    by_code,
)
from plait.platform.messages import (
    AdapterLoaded,
    AdapterStates,
    DropAdapter,
    LoadAdapter,
    PinAdapter,
    ToEngine,
)

log = logging.getLogger(__name__)


RETRY_S = 5.0  # between two tries to have a lost generation read again


@dataclass(frozen=True, slots=True)
class _Load:
    message: LoadAdapter
    answer: asyncio.Future[AdapterInfo]


@dataclass(slots=True)
class _Lost:
    """A generation that a new engine could not read again."""

    reason: str
    tried_s: float = -math.inf  # when a request last had it asked for


class EngineAdapters:
    """Generations that the engine has been asked to keep. All calls run on the event loop."""

    def __init__(self, send: Callable[[ToEngine], Awaitable[None]]) -> None:
        self._send = send
        self._live: dict[str, LoadAdapter] = {}  # loaded: an engine that restarts gets them again
        self._infos: dict[str, AdapterInfo] = {}
        self._loading: dict[str, _Load] = {}
        self._awaited: set[str] = set()  # sent again, not yet answered
        self._lost: dict[str, _Lost] = {}  # of those that live
        self._told: Mapping[str, AdapterState] = {}

    @property
    def states(self) -> Mapping[str, AdapterState]:
        """How generations stood when the engine last told, and which it has lost."""
        lost = dict.fromkeys(self._lost, AdapterState(level=AdapterLevel.LOST))
        return {**self._told, **lost}

    async def load(self, message: LoadAdapter) -> AdapterInfo:
        """Have it loaded; see `EngineClient.load_adapter`. Equal loads at a time are one."""
        generation = message.generation
        pending = self._loading.get(generation)
        if pending is not None and pending.message == message:
            return await asyncio.shield(pending.answer)
        if pending is not None:  # what it is refused for may not hold for this one
            while self._loading.get(generation) is pending:
                await asyncio.wait([pending.answer])
                await asyncio.sleep(0)  # whoever asked for it takes the answer first
            return await self.load(message)
        known, live = self._infos.get(generation), self._live.get(generation)
        if known is None or live is None:
            return await self._ask(message)
        if generation not in self._lost and (live.pinned or not message.pinned):
            return known
        return await self._ask(structs.replace(message, pinned=message.pinned or live.pinned))

    async def _ask(self, message: LoadAdapter) -> AdapterInfo:
        """Ask the engine, and remember what it has loaded."""
        generation = message.generation
        answer: asyncio.Future[AdapterInfo] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda f: f.cancelled() or f.exception())  # none may await it
        self._loading[generation] = _Load(message, answer)
        try:
            await self._send(message)
            info = await asyncio.shield(answer)
        except PlaitError as error:
            if not answer.done():
                answer.set_exception(error)
            raise
        finally:
            self._loading.pop(generation, None)
        self._live[generation], self._infos[generation] = message, info
        self._lost.pop(generation, None)
        return info

    async def pin(self, generation: str, *, pinned: bool) -> None:
        """See `EngineClient.pin_adapter`."""
        live = self._live.get(generation)
        if live is None or live.pinned == pinned:
            return
        wanted = structs.replace(live, pinned=pinned)
        if pinned and generation not in self._loading:
            try:
                await self._ask(wanted)  # loading what is there is pinning it, with an answer
            except EngineDied:
                self._live[generation] = wanted  # the next engine is asked for that
                raise
        else:
            self._live[generation] = wanted
            await self._send(PinAdapter(generation=generation, pinned=pinned))

    async def drop(self, generation: str) -> None:
        """See `EngineClient.drop_adapter`."""
        self._live.pop(generation, None)
        self._infos.pop(generation, None)
        self._lost.pop(generation, None)
        self._awaited.discard(generation)
        await self._send(DropAdapter(generation=generation))

    async def check(self, generations: Iterable[str]) -> None:
        """Raise `AdapterStorageFailed` where the engine has lost one, and have it read again."""
        for generation in generations:
            lost = self._lost.get(generation)
            if lost is None:
                continue
            now = time.monotonic()
            if now - lost.tried_s >= RETRY_S and generation not in self._loading:
                lost.tried_s = now
                await self._send(self._live[generation])
            raise AdapterStorageFailed(
                "the engine was started anew and could not read this adapter again "
                f"({lost.reason}); it is tried again: retry in some seconds, or load it anew"
            )

    def take(self, message: AdapterLoaded | AdapterStates) -> None:
        """What the engine told."""
        if isinstance(message, AdapterStates):
            self._told = message.states
            return
        generation = message.generation
        self._awaited.discard(generation)
        pending = self._loading.get(generation)
        if pending is None:
            self._take_again(message)
        elif not pending.answer.done():
            if message.info is not None:
                pending.answer.set_result(message.info)
            else:
                pending.answer.set_exception(_error_of(message))

    def _take_again(self, message: AdapterLoaded) -> None:
        """The answer for what was loaded before."""
        generation = message.generation
        if generation not in self._live:
            return
        if message.error is None:
            self._lost.pop(generation, None)
            return
        log.error("adapter %s is lost: %s", generation[:12], message.error[1])
        self._lost.setdefault(generation, _Lost("")).reason = message.error[1]

    def engine_ended(self, error: PlaitError) -> None:
        """Loads under way fail; what was loaded will be asked for again."""
        self._told = {}
        for pending in self._loading.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    async def send_again(self) -> None:
        """Ask a new engine for everything that was loaded."""
        self._lost.clear()
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
