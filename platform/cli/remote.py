"""Asks an OpenAI-compatible server for the answers of `plait chat` and `plait complete`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from plait.platform.bench.load import first_model
from plait.platform.cli.answering import Message, Piece
from plait.platform.core import SamplingParams
from plait.platform.errors import EngineDied, PlaitError, by_code

_DEFAULTS = SamplingParams()
# Sent only where set: other servers refuse the fields that OpenAI's API lacks.
_OPTIONAL = ("top_k", "min_p", "repetition_penalty", "seed", "stop")


class RemoteAnswerer:
    """Streams answers of a server; `model` None takes the first it lists."""

    def __init__(
        self, url: str, *, model: str | None, api_key: str | None, adapter: str | None = None
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self.name = model or first_model(self._url, api_key)
        self._adapter = adapter
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Reading may wait: a long prompt is silent until its first token.
        timeout = httpx.Timeout(10, read=None)
        self._client = httpx.Client(base_url=self._url, headers=headers, timeout=timeout)

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[Piece]:
        """The answer to a conversation."""
        return self._stream("/v1/chat/completions", {"messages": list(messages)}, params)

    def complete(self, prompt: str, params: SamplingParams) -> Iterator[Piece]:
        """What follows a text."""
        return self._stream("/v1/completions", {"prompt": prompt}, params)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _stream(self, path: str, ask: dict[str, Any], params: SamplingParams) -> Iterator[Piece]:
        body = ask | self._body(params)
        try:
            with self._client.stream("POST", path, json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    reply.read()
                    raise error_of(reply.text, reply.status_code)
                for line in reply.iter_lines():
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        yield _piece(json.loads(data))
        except httpx.HTTPError as error:
            raise EngineDied(f"{self._url}: {type(error).__name__}: {error}") from None
        raise EngineDied(f"{self._url} ended the stream before the answer's end")

    def _body(self, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if self._adapter is not None:
            body["adapter"] = self._adapter
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        changed = (name for name in _OPTIONAL if getattr(params, name) != getattr(_DEFAULTS, name))
        return body | {name: getattr(params, name) for name in changed}


def _piece(chunk: dict[str, Any]) -> Piece:
    if "error" in chunk:
        raise error_of(json.dumps(chunk), None)
    usage = chunk.get("usage") or {}
    choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
    return Piece(
        text=choice.get("text") or (choice.get("delta") or {}).get("content") or "",
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_output_tokens=usage.get("completion_tokens") or 0,
        finish_reason=choice.get("finish_reason"),
    )


def error_of(text: str, status: int | None) -> PlaitError:
    """The server's error as ours; its own words where it has some."""
    try:
        error = json.loads(text)["error"]
        message, code = str(error["message"]), str(error.get("code"))
    except (ValueError, KeyError, TypeError):
        return EngineDied(f"the server answered {status}: {text[:200]}")
    return by_code(code)(message)
