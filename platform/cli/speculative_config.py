"""vLLM's `--speculative-config`, as far as it says what our own settings say."""

from __future__ import annotations

import json
from typing import Any

from plait.platform.errors import ConfigError

_TEXT = ("ngram", "suffix")  # on anyway, both at once
_MODEL = ("draft_model", "eagle3")
_KEYS = ("method", "model", "num_speculative_tokens")


def speculative_options(text: str, origin: str) -> dict[str, Any]:
    """Fields of `Options`. Raises `ConfigError` for what has no meaning here."""
    config = _parsed(text, origin)
    unknown = sorted(set(config) - set(_KEYS))
    if unknown:
        raise _error(
            f"{origin} has {', '.join(unknown)}, which Plait does not take: it measures what pays "
            f"and chooses by itself. Keep {', '.join(_KEYS)}"
        )
    method, model = config.get("method"), config.get("model")
    if method is None and model is not None:
        method = "draft_model"
    if method not in (*_TEXT, *_MODEL):
        served = ", ".join((*_TEXT, *_MODEL))
        raise _error(f"{origin} wants a method among {served}, not {method!r}")
    options: dict[str, Any] = {"speculation": "auto"}
    if method in _MODEL:
        if not isinstance(model, str) or not model:
            raise _error(f"{origin}: method {method} needs a model, a directory or hub id")
        options["draft_model"] = model
    elif model is not None and model != method:
        raise _error(f"{origin}: method {method} drafts from text and takes no model")
    most = config.get("num_speculative_tokens")
    if most is not None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise _error(f"{origin} wants num_speculative_tokens of at least 1, not {most!r}")
        options["max_draft_tokens"] = most
    return options


def _parsed(text: str, origin: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise _error(f'{origin} wants a JSON object, such as {{"method": "ngram"}}')
    return config


def _error(message: str) -> ConfigError:
    return ConfigError(message, param="speculative-config")
