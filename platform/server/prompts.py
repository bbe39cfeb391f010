"""From messages or prompts to token ids. Runs in the thread pool: nothing here touches the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest, Unsupported
from plait.structured.tools import history
from plait.structured.tools.prompt import tool_prompt
from plait.vision.parts import MEDIA_PARTS

if TYPE_CHECKING:
    from plait.platform.server.schemas import (
        ChatMessage,
        ChatTemplating,
        CompletionRequest,
    )
    from plait.platform.server.settings import Limits
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.tools.request import ToolWish
    from plait.vision.parts import PartReader
    from plait.vision.placing import PlacedImages


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, tokenized. `echo` is the text that stands before the answer, if asked for."""

    token_ids: list[int]
    echo: str = ""
    begins: bool | None = False  # whether the reply begins inside of thinking; None: it may
    images: PlacedImages | None = None


# Keys of a message that say nothing the model reads here; clients send back what they were given.
_HARMLESS_KEYS = frozenset({"annotations", "id", "refusal", "status", "type"})
# Passed to the template, which reads them or does not.
_TEMPLATE_KEYS = frozenset({"name", "reasoning_content", "reasoning", "tool_call_id"})


def check_chat(body: ChatTemplating, reader: PartReader) -> list[dict[str, Any]]:
    """The messages as the template takes them; `reader` keeps their images.

    Raises what is wrong or not served, by name.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    if not body.messages:
        raise BadRequest("messages is empty: give at least one message", param="messages")
    return [_plain_message(one, reader, f"messages[{i}]") for i, one in enumerate(body.messages)]


def _plain_message(message: ChatMessage, reader: PartReader, at: str) -> dict[str, Any]:
    if message.role == "function":
        raise Unsupported(
            f"{at}.role: 'function' is an older form; use 'tool' with a tool_call_id",
            param=f"{at}.role",
        )
    # OpenAI's newer word for the same role; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, reader, at)}
    for key, value in (message.model_extra or {}).items():
        if value is None or value == [] or key in _HARMLESS_KEYS:
            continue
        if key == "tool_calls" and role == "assistant":
            plain[key] = history.read_calls(value, f"{at}.{key}")
            continue
        if key in ("tool_calls", "function_call", "audio"):
            raise Unsupported(f"{at}.{key} is not served", param=f"{at}.{key}")
        if key not in _TEMPLATE_KEYS:
            shown = key[:64]
            raise BadRequest(f"{at}: unknown key {shown!r}", param=f"{at}.{shown}")
        if not isinstance(value, str):
            raise BadRequest(f"{at}.{key} must be a string", param=f"{at}.{key}")
        plain[key] = value
    return plain


def _content(message: ChatMessage, reader: PartReader, at: str) -> str | list[dict[str, Any]]:
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise BadRequest(f"{at}.content is required", param=f"{at}.content")
        return ""
    if isinstance(content, list):
        return [
            reader.read(part, f"{at}.content[{i}]", message.role)
            if _is_media(part)
            else _text_part(part, f"{at}.content[{i}]")
            for i, part in enumerate(content)
        ]
    return content


def _is_media(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in MEDIA_PARTS


def _text_part(part: dict[str, Any], at: str) -> dict[str, Any]:
    kind = part.get("type")
    # "refusal" parts come back with the history of other servers' answers.
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if kind not in ("text", "refusal", "input_text", "output_text"):
        raise BadRequest(f"{at}.type must be 'text'", param=f"{at}.type")
    if not isinstance(text, str):
        raise BadRequest(f"{at}.text must be a string", param=f"{at}.text")
    return {"type": "text", "text": text}


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    body: ChatTemplating,
    wish: ToolWish | None = None,
) -> str:
    """The text of a chat, with the tools that may be called."""
    tools = None
    if wish is not None or history.has_calls(messages):
        shown = tool_prompt(tokenizer, messages, wish)
        messages, tools = shown.messages, shown.tools
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    return tokenizer.render_chat(
        messages,
        tools=tools,
        add_generation_prompt=_add_generation_prompt(body),
        continue_final_message=body.continue_final_message,
        template_kwargs=kwargs or None,
    )


def _add_generation_prompt(body: ChatTemplating) -> bool:
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def final_text(messages: list[dict[str, Any]]) -> str:
    """Text of the last message, for `echo` where it is continued."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def split_prompts(body: CompletionRequest, limits: Limits) -> list[str | list[int]]:
    """The prompts of a completion request: one, or a list of them. Raises `BadRequest`."""
    prompt = body.prompt
    prompts: list[Any]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    if not prompts:
        raise BadRequest("prompt is empty: give at least one", param="prompt")
    if len(prompts) > limits.prompts:
        raise BadRequest(
            f"prompt: {len(prompts)} prompts are over the limit of {limits.prompts}",
            param="prompt",
        )
    return prompts


def encode_prompts(
    tokenizer: Tokenizer, prompts: list[str | list[int]], body: CompletionRequest, room: int
) -> list[Prompt]:
    """Token ids (and the text to echo) of each prompt; `room`: tokens that a prompt may have."""
    return [_encode_prompt(tokenizer, prompt, body, room) for prompt in prompts]


def _encode_prompt(
    tokenizer: Tokenizer, prompt: str | list[int], body: CompletionRequest, room: int
) -> Prompt:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
    else:
        ids = prompt
    kept = truncate(ids, body.truncate_prompt_tokens, room)
    if not body.echo:
        return Prompt(token_ids=kept)
    if isinstance(prompt, str) and len(kept) == len(ids):
        return Prompt(token_ids=kept, echo=prompt)
    echo = tokenizer.decode(
        kept,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
    )
    return Prompt(token_ids=kept, echo=echo)


def truncate(token_ids: list[int], keep: int | None, room: int) -> list[int]:
    """The last `keep` tokens, only where the client asked for it; -1: as many as fit."""
    if keep is None:
        return token_ids
    if keep == -1:
        if room < 1:  # max_tokens leaves no room; the length check says so with the numbers
            return token_ids
        keep = room
    if keep < 1:
        raise BadRequest(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    return token_ids[-keep:]
