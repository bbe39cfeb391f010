"""Load on a server over HTTP: sends requests at a pace, reads the streams, notes the times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from plait.platform.bench.workload import arrivals
from plait.platform.errors import ConfigError, EngineDied, ModelNotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and what to ask it for."""

    url: str
    model: str
    api_key: str | None = None
    chat: bool = False
    output_tokens: int = 64
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True, kw_only=True)
class Sample:
    """What one request saw. Times are seconds; `error` is set where it failed."""

    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between chunks that carry text
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float:
        """Mean seconds per output token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Either so many requests at a time, or a Poisson stream of so many per second."""

    concurrency: int | None = None
    rate_per_s: float | None = None
    seed: int = 0


def first_model(url: str, api_key: str | None = None) -> str:
    """The first model a server lists; raises where it cannot be asked."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
    except httpx.HTTPError as error:
        raise EngineDied(
            f"no server answers at {url} ({type(error).__name__}): start one with "
            "`plait serve`, or correct --url"
        ) from None
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"{url} wants an API key: give it with --api-key or PLAIT_API_KEY")
    if reply.status_code != httpx.codes.OK:
        raise EngineDied(f"{url}/v1/models answered {reply.status_code}: is it an OpenAI server?")
    models = reply.json().get("data") or []
    if not models:
        raise ModelNotFound(f"{url} serves no model")
    return str(models[0]["id"])


async def run_load(
    target: Target, prompts: Sequence[str], pace: Pace
) -> tuple[list[Sample], float]:
    """Send every prompt; the samples in the order of prompts, and the seconds it all took."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        headers=target.headers, timeout=target.timeout_s, limits=limits
    ) as client:
        start_s = time.perf_counter()
        samples = await _at_pace(client, target, prompts, pace)
        return samples, time.perf_counter() - start_s


async def _at_pace(
    client: httpx.AsyncClient, target: Target, prompts: Sequence[str], pace: Pace
) -> list[Sample]:
    gate = asyncio.Semaphore(pace.concurrency or len(prompts))

    async def one(prompt: str, delay_s: float) -> Sample:
        await asyncio.sleep(delay_s)
        async with gate:
            return await _ask(client, target, prompt)

    delays = arrivals(pace.rate_per_s, seed=pace.seed) if pace.rate_per_s else None
    return await asyncio.gather(*(one(p, next(delays) if delays else 0.0) for p in prompts))


async def _ask(client: httpx.AsyncClient, target: Target, prompt: str) -> Sample:
    sample = Sample()
    start_s = last_s = time.perf_counter()
    path = "/v1/chat/completions" if target.chat else "/v1/completions"
    try:
        async with client.stream("POST", target.url + path, json=_body(target, prompt)) as reply:
            if reply.status_code != httpx.codes.OK:
                text = (await reply.aread()).decode(errors="replace")
                sample.error = f"{reply.status_code}: {_message(text)}"
                return sample
            async for chunk in events(reply):
                now_s = time.perf_counter()
                if "error" in chunk:
                    sample.error = str(chunk["error"].get("message", chunk["error"]))
                    return sample
                if usage := chunk.get("usage"):
                    sample.num_prompt_tokens = usage["prompt_tokens"]
                    sample.num_output_tokens = usage["completion_tokens"]
                if _has_text(chunk):
                    if sample.ttft_s:
                        sample.gaps_s.append(now_s - last_s)
                    else:
                        sample.ttft_s = now_s - start_s
                    last_s = now_s
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.e2e_s = last_s - start_s
    if not sample.error and not sample.ttft_s:
        sample.error = "the answer held no text"
    return sample


def _body(target: Target, prompt: str) -> dict[str, Any]:
    ask: dict[str, Any] = (
        {"messages": [{"role": "user", "content": prompt}]} if target.chat else {"prompt": prompt}
    )
    return ask | {
        "model": target.model,
        "max_tokens": target.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    async for line in reply.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def _has_text(chunk: dict[str, Any]) -> bool:
    for choice in chunk.get("choices", ()):
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            return True
    return False


def _message(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return text[:200]
