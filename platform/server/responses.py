"""The bodies that clients get, as msgspec structs: typed, and encoded in a microsecond or two.

Fields without a default are always written; the others only where they have something to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

LogprobsJson = dict[str, Any]


class PromptTokensDetails(msgspec.Struct):
    """Parts of `prompt_tokens`."""

    cached_tokens: int
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET  # where there are images


class DraftCounts(msgspec.Struct):
    """Drafts of one source: how many a step verified, and how many of these are output."""

    drafted: int
    accepted: int


class SpeculationDetails(msgspec.Struct):
    """Drafts of all sources."""

    drafted_tokens: int
    accepted_tokens: int
    by_source: dict[str, DraftCounts]


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Parts of `completion_tokens`."""

    reasoning_tokens: int = 0  # counts as text
    forced_tokens: int = 0  # followed from the grammar, and were verified at no step of their own
    speculation: SpeculationDetails | msgspec.UnsetType = msgspec.UNSET  # where there were drafts


FORCED = "grammar"  # the source of drafts that a grammar forces


def completion_details(answers: Iterable[dict[str, DraftCounts]]) -> CompletionTokensDetails:
    """Of all answers of a request, each with its drafts by source."""
    total: dict[str, DraftCounts] = {}
    for drafts in answers:
        for source, counts in drafts.items():
            known = total.setdefault(source, DraftCounts(drafted=0, accepted=0))
            known.drafted += counts.drafted
            known.accepted += counts.accepted
    if not total:
        return CompletionTokensDetails()
    return CompletionTokensDetails(
        forced_tokens=total[FORCED].accepted if FORCED in total else 0,
        speculation=SpeculationDetails(
            drafted_tokens=sum(counts.drafted for counts in total.values()),
            accepted_tokens=sum(counts.accepted for counts in total.values()),
            by_source=total,
        ),
    )


class Usage(msgspec.Struct):
    """Tokens of a request, over all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class FunctionJson(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A called function, or what a chunk adds to its arguments."""

    name: str | None = None
    arguments: str


class ToolCallJson(msgspec.Struct, kw_only=True):
    """One call of a whole message."""

    id: str
    type: str = "function"
    function: FunctionJson


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to one call: id, type and name once, then arguments."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionJson


class Message(msgspec.Struct, kw_only=True):
    """An assistant's whole message."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallJson] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer."""

    index: int
    message: Message
    logprobs: LogprobsJson | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: LogprobsJson | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One continuation, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: LogprobsJson | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None


class Completion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Chat completions, text completions and their chunks: `object` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    adapter_generation: str | list[str] | None = None  # a list where there are several
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None
    warnings: list[str] | None = None  # of a grammar, such as a tool without its schema


class Model(msgspec.Struct, kw_only=True):
    """A served model or adapter."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "plait"
    root: str  # a name, never a path
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """All that is served."""

    object: str = "list"
    data: list[Model]


class Tokens(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


encode = msgspec.json.Encoder().encode
