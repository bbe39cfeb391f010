"""Settings of the commands that ask a model or a server something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.platform.cli.flags import Flag, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How `chat` and `complete` ask: fields of `SamplingParams`, and where to send them."""

    url: str | None = None
    api_key: str | None = None
    adapter: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Administering:
    """Which server `plait adapters` speaks to."""

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None
    admin_key: str | None = None


def _answer(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Asking, "Answer", field, help, **more)


ANSWER = (
    _answer("url", "Ask the server at this URL; MODEL then is its name there.", metavar="URL"),
    _answer("api_key", "API key of that server.", secret=True, metavar="KEY"),
    _answer(
        "adapter",
        "Adapter to answer with: a directory or hub id; with --url its name there.",
        metavar="ADAPTER",
    ),
    _answer("max_tokens", "Longest answer. Default: up to the context's end.", low=1),
    _answer("temperature", "0: always the likeliest token.", low=0, high=100),
    _answer("top_p", "Choose within this probability of the likeliest.", low=0.0001, high=1),
    _answer("top_k", "Choose among so many likeliest tokens; 0: all.", low=0),
    _answer("min_p", "Drop tokens below this share of the likeliest.", low=0, high=1),
    _answer("repetition_penalty", "Above 1: fewer repetitions.", low=0.01, high=100),
    _answer("seed", "Same seed, same answer.", low=0),
    _answer("stop", "Text that ends the answer. Repeatable.", metavar="TEXT"),
)
SYSTEM = (_answer("system", "System message."),)
ADMIN = (
    flag(Administering, "Server", "url", "Server to speak to.", metavar="URL"),
    flag(Administering, "Server", "api_key", "Its API key.", secret=True, metavar="KEY"),
    flag(
        Administering,
        "Server",
        "admin_key",
        "Its admin key, which load and unload need.",
        secret=True,
        metavar="KEY",
    ),
)
