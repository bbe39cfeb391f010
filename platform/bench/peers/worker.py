"""One engine of a comparison in a process of its own: answers requests, one line of JSON each.

It is run by its path, `PYTHON worker.py PEER CORES`, with the Python of the engine's environment,
where plait need not be installed. So neither this file nor a peer's imports anything of ours, but
plait's own. `PEER_peer.py` beside this file holds a class `Engine`:

    Engine(weights: str, **options)
    versions: dict[str, str]
    run(prompts, output_tokens, step)

`run` answers token ids greedily, exactly `output_tokens` each, and calls `step` with the new
(sequence, token ids) whenever some are known.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


class Recorder:
    """Notes when the tokens of a run came, by the clock on the wall and by processor time."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, list[tuple[int, list[int]]]]] = []
        self._start = (time.perf_counter(), time.process_time())

    def __call__(self, tokens: list[tuple[int, list[int]]]) -> None:
        """New tokens of some sequences: they are known now."""
        wall, processor = time.perf_counter(), time.process_time()
        self.steps.append((wall - self._start[0], processor - self._start[1], tokens))


class Worker:
    """Holds the engine between requests."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._engine: Any = None

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """What one request asks; raises whatever the engine raises."""
        if ask["op"] == "load":
            start = time.perf_counter()
            module = importlib.import_module(f"{self._peer}_peer")
            self._engine = module.Engine(ask["weights"], **ask["options"])
            seconds = time.perf_counter() - start
            return {"seconds": seconds, "versions": self._engine.versions}
        if ask["op"] == "run":
            recorder = Recorder()
            self._engine.run(ask["prompts"], ask["output_tokens"], recorder)
            return {"steps": recorder.steps}
        if ask["op"] == "probe":
            result: dict[str, Any] = self._engine.probe(ask["seconds"])
            return result
        raise ValueError(f"no such request as {ask['op']}")


def main(peer: str, cores: str) -> None:
    """Answer requests until standard input ends."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # What libraries print must not stand between the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        worker = Worker(peer)
        for line in sys.stdin:
            try:
                reply = worker.answer(json.loads(line))
            except Exception as error:  # noqa: BLE001 (an engine may raise anything)
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
