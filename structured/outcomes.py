"""What is known of grammars already: compiled ones and refusals, in memory and on disk."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import msgspec

from plait.platform.errors import BadRequest, by_code
from plait.structured import backends, frames
from plait.structured.cache import DiskCache, MemoryCache
from plait.structured.spec import CompiledGrammar
from plait.structured.work import Outcome, flight_key

_REFUSALS_BYTES = 4 << 20
_REFUSAL_BYTES = 4096  # what one counts for


class Outcomes:
    """Outcomes of compiles. Thread-safe; its disk raises nothing."""

    def __init__(self, *, cache_bytes: int, refusals_kept_s: float, disk: DiskCache | None) -> None:
        self._compiled: MemoryCache[CompiledGrammar] = MemoryCache(cache_bytes)
        self._refused: MemoryCache[tuple[frames.Refused, float]] = MemoryCache(_REFUSALS_BYTES)
        self._refusals_kept_s = refusals_kept_s
        self._disk = disk
        self._version = _version()

    def key(self, job: frames.Job) -> str:
        """Over all that decides the outcome, but for the field that errors name."""
        # JSON on one line, so that no part runs into another.
        parts = [self._version, job.digest, job.kind, str(job.strict), job.options, job.content]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def on_disk(self) -> bool:
        """Whether `read` may find any."""
        return self._disk is not None

    def compiled(self, key: str) -> CompiledGrammar | None:
        """From memory."""
        return self._compiled.get(key)

    def refused(self, key: str, param: str) -> frames.Refused | None:
        """A refusal that is not too old, for requests whose field is called so."""
        found = self._refused.get(flight_key(key, param))
        return found[0] if found is not None and found[1] > time.monotonic() else None

    def keep(self, key: str, param: str, outcome: Outcome) -> None:
        """In memory; but not what was no fault of the request."""
        if isinstance(outcome, CompiledGrammar):
            self._compiled.put(key, outcome, len(outcome.payload) + 512)
        elif issubclass(by_code(outcome.code), BadRequest):
            until = time.monotonic() + self._refusals_kept_s
            self._refused.put(flight_key(key, param), (outcome, until), _REFUSAL_BYTES)

    def read(self, key: str) -> CompiledGrammar | None:
        """From disk."""
        content = self._disk.get(key) if self._disk else None
        if content is None:
            return None
        try:
            return msgspec.msgpack.decode(content, type=CompiledGrammar)
        except msgspec.MsgspecError:
            return None

    def write(self, key: str, outcome: Outcome) -> None:
        """To disk, where there is one."""
        if isinstance(outcome, CompiledGrammar) and self._disk is not None:
            self._disk.put(key, msgspec.msgpack.encode(outcome))

    @property
    def num_bytes(self) -> int:
        """What the compiled grammars in memory take."""
        return self._compiled.num_bytes


def _version() -> str:
    """Changes with the libraries and with each line of ours that decides what is compiled."""
    digest = hashlib.sha256()
    for name in backends.NAMES:
        digest.update(f"{name} {backends.version(name)}\n".encode())
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
