"""Request fields that are not honoured: harmless ones, and ones refused by name.

Everything else that is not in a schema is unknown, and refused with the nearest known name.
Only fields without an effect on the answer here may stand in `IGNORED`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from typing import Any

from plait.platform.errors import BadRequest, Unsupported

log = logging.getLogger("plait.server")

# Sent by SDKs and frameworks; accepted and ignored.
IGNORED = frozenset(
    {
        "audio",
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    }
)

# Known elsewhere, not served here: field → what to do.
REFUSED: dict[str, str] = {
    "chat_template": "the template comes with the model; set it when the server starts",
    "mm_processor_kwargs": "the served model takes text only",
    "media_io_kwargs": "the served model takes text only",
    "prompt_embeds": "prompts are text or token ids",
    "kv_transfer_params": "KV transfer between servers is not served",
    "vllm_xargs": "there are no such arguments here",
    "length_penalty": "beam search is not served",
    "early_stopping": "beam search is not served",
    "include_reasoning": "reasoning is not parsed: it is part of the text",
    "thinking_token_budget": "reasoning is not parsed; bound the answer with max_tokens",
    "lora_request": "name a loaded adapter as model or adapter; paths are not taken from requests",
    "documents": "put the documents into the messages",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
}

_MESSAGE = "{name} is not served here: {advice}"


def _has_effect(name: str, value: Any) -> bool:
    """Whether ignoring this value of an ignorable field would change what the client gets."""
    if name == "functions":
        return bool(value)
    if name == "function_call":
        return bool(value not in ("none", "auto"))
    if name == "modalities":
        return bool(value != ["text"])
    return name == "audio"


def split_fields(
    body: dict[str, Any], known: Collection[str], *, allow_unknown: bool
) -> dict[str, Any]:
    """The known fields of `body` that have a value; null counts as absent.

    Raises `Unsupported` or `BadRequest` for a field that must not be dropped in silence.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name in IGNORED:
            if value is not None and _has_effect(name, value):
                raise Unsupported(f"{name} is not served here: only text comes back", param=name)
        elif name in REFUSED:
            if value is not None:
                raise Unsupported(_MESSAGE.format(name=name, advice=REFUSED[name]), param=name)
        elif allow_unknown:
            _log_once(name)
        else:
            raise _unknown(name, known)
    return kept


def _unknown(name: str, known: Collection[str]) -> BadRequest:
    shown = name if len(name) <= 64 else name[:64] + "…"
    near = difflib.get_close_matches(name[:64], known, n=1)
    advice = f"did you mean {near[0]}?" if near else "leave it out"
    error = BadRequest(f"unknown field {shown!r}: {advice}", param=shown)
    error.code = "unknown_field"
    return error


_logged: set[str] = set()
_MAX_LOGGED = 256


def _log_once(name: str) -> None:
    if len(_logged) < _MAX_LOGGED and name not in _logged:
        _logged.add(name)
        log.warning("unknown request field %r is ignored", name[:64])
