"""What an adapter's bundle means for whoever serves it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from plait.platform.core import InvalidParameter, SamplingParams
from plait.platform.errors import ConfigError, InvalidAdapter

if TYPE_CHECKING:
    from plait.adapters.bundle import Bundle
    from plait.platform.tokenizer import Tokenizer

_NOT_SERVED = ("response_format", "draft_adapter")


def tokenizer_of(bundle: Bundle | None, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the bundle's template.

    Raises `InvalidAdapter` for what no request could be served with, so that loading fails and
    not each request.
    """
    if bundle is None:
        return tokenizer
    for name in _NOT_SERVED:
        if getattr(bundle, name) is not None:
            raise InvalidAdapter(f"plait_adapter.json: {name} is not served yet: take it out")
    try:
        with_defaults(SamplingParams(), bundle)
        if bundle.chat_template is not None:
            return tokenizer.with_chat_template(bundle.chat_template)
    except (InvalidParameter, ConfigError) as error:
        raise InvalidAdapter(f"plait_adapter.json: {error}") from None
    return tokenizer


def with_defaults(params: SamplingParams, bundle: Bundle | None) -> SamplingParams:
    """`params` with what the bundle says, for who said nothing."""
    if bundle is None:
        return params
    changes: dict[str, Any] = dict(bundle.sampling)
    if bundle.stop:
        changes["stop"] = bundle.stop
    return dataclasses.replace(params, **changes)
