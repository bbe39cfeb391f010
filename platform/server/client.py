"""The seam between the server and the engine: everything HTTP needs of an engine, and no more.

`ProcessClient` (process.py) drives an engine in its own process; tests use a fake.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from plait.adapters.info import AdapterInfo, AdapterState, AddedToken
from plait.platform.config import EngineConfig
from plait.platform.core import Event, Request
from plait.platform.messages import Stats


class EngineClient(Protocol):
    """One engine as the server sees it. All methods run on the server's event loop."""

    @property
    def config(self) -> EngineConfig | None:
        """None until the engine is ready for the first time."""

    @property
    def stats(self) -> Stats:
        """The newest gauges and counters."""

    @property
    def ready(self) -> bool:
        """Whether requests can be taken: started, not draining, not restarting."""

    @property
    def healthy(self) -> bool:
        """Whether the engine makes progress: fresh heartbeat, no work without steps."""

    @property
    def unhealthy_reason(self) -> str:
        """Why `healthy` or `ready` is false, for people; empty when both are true."""

    def stream(self, request: Request, *, timeout_s: float | None = None) -> AsyncIterator[Event]:
        """Submit a request; yield its events (all `n` sequences interleaved) to their end.

        Ends after the last sequence's event with a `finish_reason`. Raises `PlaitError` where
        the engine refuses, fails or dies. Closing the iterator early (or cancelling the task
        that reads it) aborts what is unfinished.
        """

    async def load_adapter(
        self,
        generation: str,
        directory: str,
        *,
        pinned: bool = False,
        allow_zero_delta: bool = False,
        added_tokens: tuple[AddedToken, ...] = (),
    ) -> AdapterInfo:
        """Have the engine read a generation; back once requests can use it.

        The engine keeps it, over its own restarts too, until `drop_adapter`; the directory must
        stay as long. Answers with it may have the text of `added_tokens`. Raises `AdapterError`
        with a report, `EngineDied`.
        """

    async def pin_adapter(self, generation: str, *, pinned: bool) -> None:
        """Keep a loaded generation on the device, or let it be evicted again.

        Raises `AdapterBytesExceeded` where the pinned would not fit.
        """

    async def drop_adapter(self, generation: str) -> None:
        """No request will name the generation any more; an unknown one is no error."""

    @property
    def adapter_states(self) -> Mapping[str, AdapterState]:
        """How the loaded generations stood when the engine last told."""

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let running requests end, then abort what is left."""

    async def close(self) -> None:
        """End the engine process and reap it."""
