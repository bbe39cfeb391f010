"""What an adapter's bundle says where a request says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from plait.structured.requests import FIELDS

if TYPE_CHECKING:
    from plait.adapters.bundle import Bundle
    from plait.platform.server.schemas import GenerationRequest

_CONSTRAINTS = FIELDS | {"tools"}

Body = TypeVar("Body", bound="GenerationRequest")


def with_defaults(body: Body, bundle: Bundle | None) -> Body:
    """The request with what the bundle says in the place of the API's defaults.

    Its response format counts where the request has neither a constraint nor tools.
    """
    if bundle is None:
        return body
    given = body.model_fields_set
    update: dict[str, Any] = dict(bundle.sampling)
    if bundle.stop:
        update["stop"] = list(bundle.stop)
    if bundle.response_format is not None and not given & _CONSTRAINTS:
        update["response_format"] = dict(bundle.response_format)
    if "max_completion_tokens" in given:  # another word for max_tokens
        update.pop("max_tokens", None)
    return body.model_copy(update={k: v for k, v in update.items() if k not in given})
