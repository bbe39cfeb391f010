"""The engine's end of its socket."""

from pathlib import Path

import msgspec
import zmq

from plait.platform.engine_process import Link
from plait.platform.messages import AdapterLoaded, FromEngine


def test_text_that_no_frame_can_carry_is_told_in_escapes(tmp_path: Path) -> None:
    context = zmq.Context()
    reader = context.socket(zmq.PAIR)
    reader.bind(f"ipc://{tmp_path}/engine")
    link = Link(f"ipc://{tmp_path}/engine")
    try:
        link.send(AdapterLoaded(generation="g", error=("invalid", "no tensor \ud800 here")))
        assert reader.poll(10_000)
        message = msgspec.msgpack.Decoder(FromEngine).decode(reader.recv())
    finally:
        link.close()
        reader.close(0)
        context.term()
    assert message == AdapterLoaded(generation="g", error=("invalid", "no tensor \\ud800 here"))
