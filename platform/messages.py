"""What crosses the socket between the API process and the engine process: msgpack, no pickle.

One ZeroMQ PAIR over ipc. API → engine: `Start` first, then `Add`, `Abort`, `Drain`, the images of
requests, and what shall become of adapters. Engine → API: `Starting` (named phases with seconds),
`Ready`, `Events` (one per step), `Heartbeat`, what became of adapters, `Failed` (start-up failed:
code and message). Each frame is one tagged union.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from plait.adapters.info import AdapterInfo, AdapterState, AddedToken, LoadReport
from plait.platform.config import EngineConfig, Options
from plait.platform.core import Array, Event, ImageItem, Request


class Start(msgspec.Struct, tag="start"):
    """Load this; always the first message."""

    options: Options


class Add(msgspec.Struct, tag="add"):
    """Queue a request; answered by events that end with a `finish_reason`."""

    request: Request
    timeout_s: float | None = None  # the engine turns it into `Request.deadline_s` on its clock


class SendImages(msgspec.Struct, tag="send_images"):
    """Tensors of images, by `image_name`: requests that follow have them without."""

    images: dict[str, Mapping[str, Array]]


class ForgetImages(msgspec.Struct, tag="forget_images"):
    """No request that follows has these images; those that were added keep theirs."""

    names: tuple[str, ...]


def image_name(request: Request, item: ImageItem) -> str:
    """What an image is called between the processes."""
    return f"{request.cache_salt}\0{item.key}"


class Abort(msgspec.Struct, tag="abort"):
    """End these requests; unknown ones are no error."""

    request_ids: tuple[str, ...]


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Read a generation from a directory of the adapter store; answered by `AdapterLoaded`.

    The directory stays, unchanged, until `DropAdapter`: what was evicted is read from it again.
    Loading a generation that is there answers at once.
    """

    generation: str
    directory: str
    pinned: bool = False  # stays on the device
    allow_zero_delta: bool = False
    added_tokens: tuple[AddedToken, ...] = ()  # of which answers with it may consist, too


class PinAdapter(msgspec.Struct, tag="pin_adapter"):
    """Keep a generation on the device, or let it be evicted again."""

    generation: str
    pinned: bool


class DropAdapter(msgspec.Struct, tag="drop_adapter"):
    """No request will name this generation any more; it goes when its last lease ends."""

    generation: str


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


class Probed(msgspec.Struct, tag="probed"):
    """What the machine gives, 10⁹ a second: `read`, and products by type. Once, when idle."""

    rates: dict[str, float]


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
    # Rows of steps: see `row_counts`. The first three are all rows.
    prefill_rows: int = 0
    decode_rows: int = 0
    draft_rows: int = 0
    adapter_rows: int = 0  # token rows that an adapter changed
    steps_by_strands: tuple[int, ...] = ()  # bit i of an index: `row_counts.STRANDS[i]` was there
    adapter_loads: int = 0  # from disk to host memory
    adapter_load_seconds: float = 0.0
    adapter_placements: int = 0  # from host memory to the device
    adapter_placement_seconds: float = 0.0
    adapter_evictions: int = 0  # from the device
    adapter_host_bytes: int = 0
    adapter_device_bytes: int = 0
    grammar_sequences: int = 0  # whose grammar was opened
    grammar_opens: int = 0  # from the payload, not found loaded
    grammar_open_seconds: float = 0.0
    grammar_faults: int = 0  # answers that ended with `grammar_internal_error`
    grammar_bytes: int = 0  # loaded grammars, about
    mask_rows: int = 0
    mask_seconds: float = 0.0  # spent filling masks, beside the forward pass
    mask_wait_seconds: float = 0.0  # of these, how long steps waited
    encoded_images: int = 0  # by the tower; what was found in the cache is not
    encoded_rows: int = 0  # their embeddings
    encoder_seconds: float = 0.0
    encoder_hits: int = 0  # images of sequences whose embeddings were there, or under way
    encoder_misses: int = 0
    encoder_evictions: int = 0
    encoder_bytes: int = 0  # of embeddings in the cache
    image_rows: int = 0  # token rows that took embeddings
    drafts: dict[str, tuple[int, int]] = {}  # source → (verified, of these output)
    accepted_by_position: tuple[int, ...] = ()  # drafts that held, by their place in a run
    num_draft_runs: int = 0  # runs of drafts that were verified
    draft_seconds: dict[str, float] = {}  # beside the steps, by source, and choosing: "budget"
    draft_cuts: dict[str, tuple[int, int]] = {}  # source → cut by the grammar, by the budget
    # Steps that decode, by how many drafts they verified; classes: `speculative.tally.ROW_CLASSES`.
    steps_by_drafts: tuple[int, ...] = ()
    undrafted: dict[str, int] = {}  # reason → sequences of steps without drafts
    foreseen_over_taken: float = 0.0  # seconds of the last steps; 0: nothing is foreseen
    # Part of the steps → (seconds, bytes read, operations); the latter two 0 where not known.
    phases: dict[str, tuple[float, int, int]] = {}


class Events(msgspec.Struct, tag="events"):
    """What one step made known."""

    events: list[Event]
    stats: Stats | None = None  # None: little has changed since they were last sent


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """The engine lives: after a step without events, and each second when idle."""

    stats: Stats
    unfinished: int  # sequences: with work and no progress the engine is hung


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded"):
    """What came of a `LoadAdapter`: `info`, or the error and perhaps a report."""

    generation: str
    info: AdapterInfo | None = None
    error: tuple[str, str] | None = None  # (code, message)
    report: LoadReport | None = None  # of a refusal


class AdapterStates(msgspec.Struct, tag="adapter_states"):
    """How the pool's generations stand; sent when that changed, at most a few times a second."""

    states: dict[str, AdapterState]


class Failed(msgspec.Struct, tag="failed"):
    """The start failed; the process ends."""

    code: str
    message: str


ToEngine = (
    Start | SendImages | Add | ForgetImages | Abort | LoadAdapter | PinAdapter | DropAdapter | Drain
)
FromEngine = Starting | Ready | Events | Heartbeat | Probed | AdapterLoaded | AdapterStates | Failed
