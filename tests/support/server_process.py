"""`plait serve` in processes of its own, and ways to see how it stands."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

MODEL = "tiny"
START_TIMEOUT_S = 120.0


@contextmanager
def serving(
    path: Path | None, *flags: str, log: Path = Path("/dev/null")
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server for the checkpoint, or for the default model; yields its URL and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(Path(sys.executable).with_name("plait")), "serve"),
        *([] if path is None else [str(path), "--served-model-name", MODEL]),
        *("--port", str(port), "--kv-cache-memory", "64MiB", "--threads", "1", *flags),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(url):
            assert process.poll() is None, "the server ended while starting"
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def image_bytes(url: str) -> dict[str, float]:
    """By stage, what of images is held."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [line.split() for line in lines if line.startswith("plait:image_bytes{")]
    return {name.split('"')[1]: float(value) for name, value in found}


async def until_idle(url: str) -> None:
    async with asyncio.timeout(30):
        while gauge(url, "vllm:num_requests_running") or gauge(url, "vllm:kv_cache_usage_perc"):
            await asyncio.sleep(0.05)
