"""Commands to try against the default model, to be copied as they are."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from typing import Any

from plait.platform.config import ModelInfo
from plait.platform.demo.questions import DESCRIBE, LOOK, PICTURE, data_url, message, query, squares

_COUNT = 3
_JSON = "-H 'Content-Type: application/json'"

Body = dict[str, Any]


def tries(
    url: str, model: ModelInfo, adapters: Collection[str], *, has_key: bool, socket: str | None
) -> str:
    """Three commands, the most telling of what is served. `socket` is a Unix socket's path."""
    address = f"--unix-socket {shlex.quote(socket)} http://localhost" if socket else url
    head = f"-H 'Authorization: Bearer KEY' {_JSON}" if has_key else _JSON
    lines = ["Try it:"]
    for title, body in _candidates(model, adapters)[:_COUNT]:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        flags = "-N " if body.get("stream") else ""
        command = f"curl {flags}{address}/v1/chat/completions {head} -d {shlex.quote(text)}"
        lines += ["", f"# {title}", command]
    return "\n".join(lines)


def _candidates(model: ModelInfo, adapters: Collection[str]) -> list[tuple[str, Body]]:
    """What each shows and its body, the most telling first."""
    found = []
    if "sql" in adapters:
        found.append(("an adapter, by its name as the model", _body("sql", query())))
    if "sight" in adapters and model.vision is not None:
        form = {"type": "json_schema", "json_schema": {"name": "picture", "schema": PICTURE}}
        found += [
            ("a picture of three red squares", _body("sight", _look(LOOK, squares(3, "red")))),
            (
                "picture, adapter, schema and drafts in one request",
                _body("sight", _look(DESCRIBE, squares(2, "blue")), response_format=form),
            ),
        ]
    if "fields" in adapters:
        found.append(("from a message to JSON", _body("fields", message())))
    # Small models ramble at the API's temperature of 1.
    rivers = _body(model.name, "Name three rivers.", temperature=0.2, max_tokens=60, stream=True)
    sea = _body(model.name, "What is the sea like in winter?", max_tokens=60)
    snow = _body(model.name, "Is snow hot?", structured_outputs={"choice": ["yes", "no"]})
    return [
        *found,
        ("the base model, token by token", rivers),
        ("its whole answer at once", sea),
        ("one of two words", snow),
    ]


def _body(model: str, content: object, **more: object) -> Body:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "temperature": 0, "messages": messages} | more


def _look(text: str, picture: bytes) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
    return [{"type": "text", "text": text}, image]
