"""What a compile worker and its pool say to each other, and how it is framed.

A frame is its length in four bytes and then msgpack. A constraint's content goes as JSON text, in
which numbers have any size.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from plait.structured.spec import CompiledGrammar

MAX_FRAME_BYTES = 64 << 20


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the worker, first: its bounds."""

    memory_bytes: int  # beyond what it has when it is ready
    processor_limit_s: float
    wall_limit_s: float


class Learn(msgspec.Struct, frozen=True, tag=True):
    """To the worker: a vocabulary for which jobs will come."""

    digest: str
    vocabulary: bytes


class Job(msgspec.Struct, frozen=True, tag=True):
    """To the worker: compile this."""

    digest: str  # of a vocabulary it has learned
    kind: str
    content: str
    param: str
    strict: bool
    options: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the worker: a `Learn` is done."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """From the worker: the result of a job."""

    grammar: CompiledGrammar
    retire: bool = False  # it has grown and should be replaced


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From the worker: the error of a job, to be raised as it stands."""

    code: str
    message: str
    param: str | None
    retire: bool = False


ToWorker = Start | Learn | Job
FromWorker = Ready | Done | Refused

_encoder = msgspec.msgpack.Encoder()


def send(link: socket.socket, message: ToWorker | FromWorker) -> None:
    """Write a frame. Raises OSError where the other end is gone or takes too long."""
    content = _encoder.encode(message)
    link.sendall(len(content).to_bytes(4, "big") + content)


def receive(link: socket.socket, kind: Any) -> Any:
    """Read a frame. Raises EOFError at the end, OSError where it takes too long."""
    size = int.from_bytes(_exactly(link, 4), "big")
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of {size} bytes")
    return msgspec.msgpack.decode(_exactly(link, size), type=kind)


def _exactly(link: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = link.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other end is gone")
        parts += part
    return bytes(parts)
