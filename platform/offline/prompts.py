"""Prompts of an `LLM` in all their forms, and the parameters that come with them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.platform.core import SamplingParams
from plait.platform.errors import BadRequest

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer

# Iterables of numpy's or torch's integers, and generators, do as well as lists.
Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt_token_ids": …}


def tokenize(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, Sequence[int]]:
    """Its text, where it has one, and its token ids. Raises `BadRequest`."""
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise BadRequest(
                f"a prompt mapping takes prompt and prompt_token_ids, not {sorted(unknown)}",
                param="prompt",
            )
        text = prompt.get("prompt")
        given = prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise _not_a_prompt()
        if given is None:
            return text, tokenizer.encode(text or "")
    else:
        text, given = None, prompt
    ids = _token_ids(given)
    if ids is None:
        raise _not_a_prompt()
    return text, ids


def _not_a_prompt() -> BadRequest:
    return BadRequest(
        "a prompt is text, a list of token ids, or a mapping with prompt or prompt_token_ids",
        param="prompt",
    )


def listed(values: Any, name: str) -> list[Any]:
    """Any iterable as a list. Raises `BadRequest` for what is one value."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise BadRequest(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)


def _token_ids(prompt: object) -> list[int] | None:
    """The ids, where `prompt` is a flat run of integers of any kind; else None."""
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        return None
    ids: list[int] = []
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            return None
        try:
            ids.append(operator.index(token))
        except TypeError:  # an array of several
            return None
    return ids


def several_of(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A flat list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = listed(prompts, "prompts")
    ids = _token_ids(several)
    return [ids] if ids else several


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """One for all, or one each. Raises `BadRequest`."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    params = listed(params, "params")
    if any(not isinstance(one, SamplingParams) for one in params):
        raise BadRequest("params are SamplingParams, one for all or one each", param="params")
    if len(params) != count:
        raise BadRequest(
            f"{len(params)} sampling parameters for {count} prompts: give one for all, or one each",
            param="params",
        )
    return params


def check_messages(messages: Any) -> None:
    """Raise `BadRequest` for what is no conversation: templates take a gap for an empty text."""
    for number, message in enumerate(listed(messages, "messages")):
        at = f"messages[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{at} has to be a mapping with a role and content", param=at)
        if message.get("content") is None and message["role"] != "assistant":
            raise BadRequest(f"{at}.content is required", param=f"{at}.content")
