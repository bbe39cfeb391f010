"""What crosses the socket between the API process and the engine process: msgpack, no pickle.

One ZeroMQ PAIR over ipc. API → engine: `Start` first, then `Add`, `Abort`, `Drain`.
Engine → API: `Starting` (named phases with seconds), `Ready`, `Events` (one per step),
`Heartbeat`, `Failed` (start-up failed: code and message). Each frame is one tagged union.
"""

from __future__ import annotations

from typing import Any

import msgspec

from plait.platform.config import EngineConfig, Options
from plait.platform.core import Event, Request


class Start(msgspec.Struct, tag="start"):
    """Load this; always the first message."""

    options: Options


class Add(msgspec.Struct, tag="add"):
    """Queue a request; answered by events that end with a `finish_reason`."""

    request: Request
    timeout_s: float | None = None  # the engine turns it into `Request.deadline_s` on its clock


class Abort(msgspec.Struct, tag="abort"):
    """End these requests; unknown ones are no error."""

    request_ids: tuple[str, ...]


class Drain(msgspec.Struct, tag="drain"):
    """Take nothing new; end the process when the last sequence has ended."""


class Starting(msgspec.Struct, tag="starting"):
    """A phase of the start began, or ended."""

    phase: str
    seconds: float  # that the phase took; 0 when it begins


class Ready(msgspec.Struct, tag="ready"):
    """The engine takes requests."""

    config: EngineConfig
    phases: dict[str, float]
    facts: dict[str, Any] = {}  # memory arithmetic and such, for the banner


class Stats(msgspec.Struct, frozen=True):
    """Gauges and counters at the end of a step, cumulative since start where countable."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    num_steps: int = 0
    prompt_tokens: int = 0  # of prompts that are done, computed or found
    generation_tokens: int = 0
    last_step_rows: int = 0
    step_seconds: float = 0.0


class Events(msgspec.Struct, tag="events"):
    """What one step made known."""

    events: list[Event]
    stats: Stats


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The engine lives: after a step without events, and each second when idle."""

    stats: Stats
    unfinished: int  # sequences: with work and no progress the engine is hung


class Failed(msgspec.Struct, tag="failed"):
    """The start failed; the process ends."""

    code: str
    message: str


ToEngine = Start | Add | Abort | Drain
FromEngine = Starting | Ready | Events | Heartbeat | Failed
