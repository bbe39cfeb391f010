"""What an adapter's bundle, and its own tokenizer, mean for whoever serves it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from plait.adapters.files import BUNDLE
from plait.platform.core import InvalidParameter, SamplingParams
from plait.platform.errors import BadRequest, ConfigError, InvalidAdapter
from plait.structured.requests import read_constraint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plait.adapters.bundle import Bundle
    from plait.adapters.composition import Chosen
    from plait.adapters.info import AdapterInfo
    from plait.adapters.store import StoredAdapter
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.spec import GrammarSpec


def tokenizer_of(
    stored: StoredAdapter, tokenizer: Tokenizer, *, keep_template: bool = False
) -> Tokenizer:
    """The model's tokenizer with what the adapter brings: tokens, end token, chat template.

    A template of the bundle goes before that of the adapter's own tokenizer, and this before the
    model's, unless whoever serves that has chosen one: `keep_template`. Raises `InvalidAdapter`
    for what no request could be served with, so that loading fails and not each request.
    """
    own, bundle = stored.tokenizer, stored.bundle
    extended = tokenizer.extended(own.added_tokens, end_token=own.end_token)
    template, file = (None if keep_template else own.chat_template), "chat_template"
    if bundle is not None:
        _check_bundle(bundle)
        if bundle.chat_template is not None:
            template, file = bundle.chat_template, BUNDLE
    if template is None:
        return extended
    try:
        return extended.with_chat_template(template)
    except ConfigError as error:
        raise InvalidAdapter(f"{file}: {error}") from None


def _check_bundle(bundle: Bundle) -> None:
    try:
        with_defaults(SamplingParams(), bundle)
        bundled_constraint(bundle)
    except (InvalidParameter, BadRequest) as error:
        raise InvalidAdapter(f"{BUNDLE}: {error}") from None


def bundled_constraint(bundle: Bundle | None) -> GrammarSpec | None:
    """What answers with the adapter must obey where a request says nothing of it."""
    if bundle is None or bundle.response_format is None:
        return None
    return read_constraint({"response_format": bundle.response_format})


def fit_tokenizer(
    tokenizer: Tokenizer, info: AdapterInfo, width: int
) -> tuple[Tokenizer, AdapterInfo]:
    """What of an adapter's tokens can be used, now that it is known how many the model has.

    Its report tells which cannot. Raises `InvalidAdapter` where one cannot have its id.
    """
    fitting = tokenizer.within(width)
    fitting.check()
    beyond = [t.text[:50] for t in tokenizer.added_tokens if t.token_id >= width]
    if not beyond:
        return fitting, info
    warning = (
        f"{len(beyond)} of the tokens beside the adapter have no rows in it, such as "
        f"{beyond[0]!r}: they are not used"
    )
    report = dataclasses.replace(info.report, warnings=(*info.report.warnings, warning))
    return fitting, dataclasses.replace(info, report=report)


def tokenizer_for(
    adapters: Sequence[tuple[Chosen, Tokenizer]], tokenizer: Tokenizer, param: str
) -> Tokenizer:
    """The tokenizer of a request with these adapters, each with its own; `tokenizer` the model's.

    One adapter brings all it has; several only their tokens, and these have to be the same.
    """
    if len(adapters) == 1:
        return adapters[0][1]
    found = [(one.name, own) for one, own in adapters if own.added_tokens]
    for name, own in found[1:]:
        if own.added_tokens != found[0][1].added_tokens:
            raise BadRequest(
                f"adapters {found[0][0]!r} and {name!r} add different tokens to the vocabulary: "
                "use one of them",
                param=param,
            )
    return tokenizer.extended(found[0][1].added_tokens) if found else tokenizer


def with_defaults(params: SamplingParams, bundle: Bundle | None) -> SamplingParams:
    """`params` with what the bundle says, for who said nothing."""
    if bundle is None:
        return params
    changes: dict[str, Any] = dict(bundle.sampling)
    if bundle.stop:
        changes["stop"] = bundle.stop
    return dataclasses.replace(params, **changes)
