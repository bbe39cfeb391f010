"""The engine in a process of its own: a socket on one side, `Engine.step` on the other.

Started by `server/process.py` as `python -m plait.platform.engine_process ADDRESS`. The first
frame that comes is `Start`; the first that goes is `Starting`. No pickle, no TCP.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from plait.platform.core import Event, FinishReason
from plait.platform.errors import PlaitError
from plait.platform.kept_images import KeptImages
from plait.platform.messages import (
    Abort,
    AdapterStates,
    Add,
    Drain,
    DropAdapter,
    Events,
    Failed,
    ForgetImages,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    PinAdapter,
    Probed,
    Ready,
    SendImages,
    Start,
    Starting,
    ToEngine,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from plait.platform.engine import Engine
    from plait.platform.start import Rest, Started

log = logging.getLogger(__name__)
IDLE_HEARTBEAT_S = 1.0
WAITING_HEARTBEAT_S = 0.1  # while everything waits for adapters, which is no step
ADAPTER_STATES_S = 0.25
STATS_S = 0.1
# Containers made and not freed, until a collection looks for cycles: a step leaves few.
COLLECT_AFTER = 20_000


def main() -> int:
    """The process: its exit status is 0 only after a drain."""
    logging.basicConfig(
        level=os.environ.get("PLAIT_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s engine: %(message)s",
    )
    end_with_parent()
    link = Link(sys.argv[1])
    start = link.receive(timeout_ms=60_000)
    if not isinstance(start, Start):
        return 1
    try:
        started = _start(link, start)
    except PlaitError as error:
        link.send(Failed(code=error.code, message=error.message))
        return 1
    except Exception as error:
        log.exception("start-up failed")
        link.send(Failed(code="internal_error", message=f"{type(error).__name__}: {error}"))
        return 1
    serve(link, started.engine, started.rest, started.probe)
    return 0


def end_with_parent() -> None:
    """Leave no orphan: end this process when the one that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


class Link:
    """One end of the PAIR socket; frames are msgpack of `messages` unions."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # Bounded by the queue and by max_tokens; the engine must never wait for a reader.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromEngine) -> None:
        """Queue a frame; never waits. Text that is no Unicode has its faults written out."""
        try:
            frame = self._encoder.encode(message)
        except UnicodeEncodeError:
            frame = self._encoder.encode(_readable(msgspec.to_builtins(message)))
        self._socket.send(frame)

    def receive(self, *, timeout_ms: int) -> ToEngine | None:
        """The next message, or None when none came in time."""
        # Asked for in each step, `poll` takes ten times as long to say that nothing is there.
        found = self._socket.poll(timeout_ms) if timeout_ms else self._socket.getsockopt(zmq.EVENTS)
        if not int(found) & zmq.POLLIN:
            return None
        message: ToEngine = self._decoder.decode(self._socket.recv())
        return message

    def close(self) -> None:
        """Send what is queued, for at most two seconds, and close."""
        self._socket.close()
        self._context.term()


def _readable(value: Any) -> Any:
    """A message's content with lone surrogates, which no frame can carry, as escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(each) for each in value]
    return value


def _start(link: Link, start: Start) -> Started:
    def on_phase(phase: str, seconds: float) -> None:
        link.send(Starting(phase=phase, seconds=seconds))

    on_phase("import", 0.0)
    began = time.monotonic()
    from plait.platform.start import start_engine

    on_phase("import", time.monotonic() - began)
    started = start_engine(start.options, on_phase, load_grammars=True, light=True)
    link.send(Ready(config=started.engine.config, phases=started.phases, facts=started.facts))
    # What was made by now stays: a collection that looks at it costs more than a step.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    return started


def serve(
    link: Link,
    engine: Engine,
    rest: Rest | None = None,
    probe: Callable[[], dict[str, float]] | None = None,
) -> None:
    """Take messages and step until told to drain and nothing is left.

    While there is work, messages are taken between steps, so an abort holds from the next step.
    `rest` is loaded in idle seconds, and `probe` is run in the first of them.
    """
    draining = False
    told = _Told()
    images = KeptImages()
    later = _Later(rest)
    while not (draining and not engine.has_unfinished):
        at_work = engine.has_unfinished or engine.is_loading
        timeout_ms = 0 if at_work else int(IDLE_HEARTBEAT_S * 1000)
        while (message := link.receive(timeout_ms=timeout_ms)) is not None:
            draining |= isinstance(message, Drain)
            _handle(link, engine, images, message)
            timeout_ms = 0
        if timeout_ms > 0 and probe is not None:
            link.send(Probed(rates=probe()))
            probe = None
        elif timeout_ms > 0:
            later.idle()
        events = engine.step()
        for result in engine.take_adapter_results():
            link.send(result)
        if events:
            stats = engine.stats if told.stats_are_due(engine, events) else None
            link.send(Events(events=events, stats=stats))
        elif told.heartbeat_is_due(engine.num_steps, at_work=at_work):
            link.send(Heartbeat(stats=engine.stats, unfinished=engine.num_unfinished))
        if told.states_may_be_due() and (states := engine.adapter_states()) is not None:
            link.send(AdapterStates(states=states))
            told.states()
    link.close()


class _Later:
    """What a start left out: its modules are imported in a thread, and then it is loaded."""

    def __init__(self, rest: Rest | None) -> None:
        self._rest = rest
        self._thread: threading.Thread | None = None

    def idle(self) -> None:
        """Nothing has been done for a second; a load takes another one."""
        if self._rest is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._rest.imports, daemon=True, name="imports")
            self._thread.start()
        elif not self._thread.is_alive():
            load, self._rest = self._rest.load, None
            try:
                load()
            except Exception:  # the first image fails with it
                log.exception("what images need could not be loaded")


class _Told:
    """When what was told last, so that nothing is told more often than anyone reads it."""

    def __init__(self) -> None:
        self._num_steps = -1
        self._running_waiting = (0, 0)
        self._heartbeat_s = self._states_s = self._stats_s = -1e9

    def stats_are_due(self, engine: Engine, events: list[Event]) -> bool:
        """Where sequences came, began or ended, and else a few times a second."""
        now = time.monotonic()
        before = self._running_waiting
        self._running_waiting = (engine.scheduler.num_running, engine.scheduler.num_waiting)
        due = (
            before != self._running_waiting
            or now - self._stats_s >= STATS_S
            or any(event.finish_reason is not None for event in events)
        )
        if due:
            self._stats_s = now
        return due

    def heartbeat_is_due(self, num_steps: int, *, at_work: bool) -> bool:
        """After each step, and at times where there was none."""
        now = time.monotonic()
        stepped, self._num_steps = num_steps != self._num_steps, num_steps
        due = stepped or not at_work or now - self._heartbeat_s >= WAITING_HEARTBEAT_S
        if due:
            self._heartbeat_s = now
        return due

    def states_may_be_due(self) -> bool:
        """At most a few times a second, if they changed."""
        return time.monotonic() - self._states_s >= ADAPTER_STATES_S

    def states(self) -> None:
        """They were told."""
        self._states_s = time.monotonic()


def _handle(link: Link, engine: Engine, images: KeptImages, message: ToEngine) -> None:
    if isinstance(message, Abort):
        for request_id in message.request_ids:
            engine.abort(request_id)
    elif isinstance(message, LoadAdapter):
        engine.load_adapter(message)
    elif isinstance(message, PinAdapter):
        try:
            engine.pin_adapter(message.generation, message.pinned)
        except PlaitError as error:  # the states tell that it is not pinned
            log.warning("adapter %s: %s", message.generation[:12], error.message)
    elif isinstance(message, DropAdapter):
        engine.drop_adapter(message.generation)
    elif isinstance(message, SendImages | ForgetImages):
        images.take(message)
    elif isinstance(message, Add):
        request = message.request
        if message.timeout_s is not None:
            request = replace(request, deadline_s=time.monotonic() + message.timeout_s)
        try:
            engine.add(images.complete(request))
        except Exception as error:
            if not isinstance(error, PlaitError):
                log.exception("request %s could not be added", request.request_id)
            link.send(Events(events=[_refusal(request.request_id, error)], stats=engine.stats))


def _refusal(request_id: str, error: Exception) -> Event:
    """A request the engine did not take: one event ends all of it."""
    code, message = "internal_error", "the engine could not take this request"
    if isinstance(error, PlaitError):
        code, message = error.code, error.message
    return Event(
        request_id=request_id,
        index=0,
        finish_reason=FinishReason.ERROR,
        error=(code, message),
    )


if __name__ == "__main__":
    sys.exit(main())
