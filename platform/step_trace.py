"""A line of JSON for each step, in a file: which rows it had, and what came of them.

Written by the engine's thread with one system call a step. A disk that is full, or a pipe whose
reader sleeps, ends the trace and nothing else.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from plait.platform.errors import ConfigError
from plait.platform.messages import Stats

if TYPE_CHECKING:
    from plait.platform.core import Event, StepPlan

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30  # of lines that one engine writes: some 50 hours of 50 steps a second
# A pipe must not hold the engine up: without a reader it is refused, and a full one is a fault.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC

# Kind → field of `Stats`. The first three are all rows; the others are among them.
ROW_KINDS = {
    "prefill": "prefill_rows",
    "decode": "decode_rows",
    "draft": "draft_rows",
    "adapter": "adapter_rows",
    "image": "image_rows",
    "masked": "mask_rows",
}


class StepTrace:
    """Appends to one file until it is closed, has `max_bytes` more, or cannot be written."""

    def __init__(
        self,
        path: str,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises `ConfigError` where the file cannot be opened."""
        try:
            self._file = os.open(path, _FLAGS, 0o644)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--trace-steps: {path!r} cannot be written: "
                f"{getattr(error, 'strerror', None) or error}",
                param="trace_steps",
            ) from error
        self._close = weakref.finalize(self, os.close, self._file)
        self._room = max_bytes
        self._clock = clock
        self._before = Stats()

    @property
    def is_open(self) -> bool:
        """Whether steps are still written."""
        return self._close.alive

    def begin(self, stats: Stats) -> None:
        """The next step is the first to be traced; `stats` are those before it."""
        self._before = stats

    def step(
        self,
        plan: StepPlan,
        events: SequenceOf[Event],
        stats: Stats,
        *,
        began_s: float,
        num_adapters: int,
    ) -> None:
        """A step that began at `began_s` of the engine's clock is over: `events` and `stats` go."""
        before, self._before = self._before, stats
        firsts = [span for span in plan.spans if span.sequence.started_s == began_s]
        line = json.dumps(
            {
                "step": plan.step_id,
                "time": round(self._clock(), 6),
                "seconds": round(stats.step_seconds - before.step_seconds, 6),
                "rows": _rows(before, stats),
                "adapters": num_adapters,
                "images_encoded": stats.encoded_images - before.encoded_images,
                "tokens": stats.generation_tokens - before.generation_tokens,
                "drafts": _drafts(before, stats),
                "sequences": {
                    "running": stats.num_running,
                    "waiting": stats.num_waiting,
                    "admitted": len(firsts),
                    "finished": sum(event.finish_reason is not None for event in events),
                    "preempted": len(plan.preempted),
                },
            },
            separators=(",", ":"),
        )
        self._write(line.encode() + b"\n")

    def close(self) -> None:
        """Write no more."""
        self._close()

    def _write(self, line: bytes) -> None:
        if not self.is_open:
            return
        reason = "it has reached its limit"
        if len(line) <= self._room:
            try:
                written = os.write(self._file, line)
            except OSError as error:
                written, reason = 0, error.strerror or str(error)
            else:
                reason = os.strerror(errno.ENOSPC)
            if written == len(line):
                self._room -= written
                return
        log.warning("the trace of steps ends here, and serving goes on: %s", reason)
        self.close()


def _rows(before: Stats, after: Stats) -> dict[str, int]:
    return {kind: getattr(after, n) - getattr(before, n) for kind, n in ROW_KINDS.items()}


def _drafts(before: Stats, after: Stats) -> dict[str, list[int]]:
    """Verified and accepted ones by source, of those that had any."""
    found = {}
    for source, (verified, accepted) in after.drafts.items():
        was = before.drafts.get(source, (0, 0))
        if verified > was[0]:
            found[source] = [verified - was[0], accepted - was[1]]
    return found
