"""Adapters without weights: a file that says what they are, and threads that run when told to."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from plait.adapters.adapter import Adapter
from plait.adapters.info import AdapterInfo, LoadReport
from plait.platform.errors import InvalidAdapter
from plait.platform.messages import LoadAdapter


class AdapterFiles:
    """Makes directories as the store would, and reads them as `loading.load_adapter` would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_loads: dict[str, int] = {}

    def write(
        self, generation: str, *, device_bytes: int, kv_digest: str = "", broken: bool = False
    ) -> LoadAdapter:
        """The message that has an engine load it."""
        directory = self.root / generation
        directory.mkdir(exist_ok=True)
        about = {"device_bytes": device_bytes, "kv_digest": kv_digest, "broken": broken}
        # Some are larger in memory than on disk.
        text = json.dumps(about).ljust(2 * device_bytes if device_bytes % 2 else 0)
        (directory / "adapter.json").write_text(text)
        return LoadAdapter(generation=generation, directory=str(directory))

    def load(self, generation: str, directory: Path, *, allow_zero_delta: bool) -> Adapter:
        self.num_loads[generation] = self.num_loads.get(generation, 0) + 1
        about = json.loads((directory / "adapter.json").read_text())
        if about["broken"]:
            raise InvalidAdapter("broken", report=LoadReport(unmatched=("a",)))
        info = AdapterInfo(
            generation=generation,
            report=LoadReport(num_bytes=2 * about["device_bytes"]),
            kv_digest=about["kv_digest"],
            num_bytes=2 * about["device_bytes"],
            device_bytes=-1,  # the executor knows
        )
        return Adapter(info=info)


class FakePlaces:
    """The part of an executor that the pool needs; `sizes` are device bytes by generation."""

    def __init__(self) -> None:
        self.placed: dict[str, Adapter] = {}
        self.refused: set[str] = set()  # generations that cannot be placed
        self.num_placements = 0

    def adapter_bytes(self, adapter: Adapter) -> int:
        return adapter.info.num_bytes // 2

    def place_adapter(self, adapter: Adapter) -> None:
        if adapter.generation in self.refused:
            raise RuntimeError("no")
        self.num_placements += 1
        self.placed[adapter.generation] = adapter

    def remove_adapter(self, generation: str) -> None:
        del self.placed[generation]

    @property
    def num_bytes(self) -> int:
        return sum(self.adapter_bytes(adapter) for adapter in self.placed.values())


class ManualThreads(Executor):
    """Threads that do nothing until `run`."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **rest: Any) -> Future[Any]:
        self.jobs.append(lambda: work(*args, **rest))
        return Future()

    def run(self, index: int = 0) -> None:
        self.jobs.pop(index)()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.jobs.clear()
