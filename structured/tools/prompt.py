"""How the model learns of its tools: by its own chat template, or by a text of ours.

A template that takes tools and teaches a format that we know gets the tools and messages as they
are. Otherwise the system message gets the text below, and calls and results of the conversation
are written into ordinary messages, in Hermes' markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.structured.tools import formats
from plait.structured.tools.formats import ToolFormat

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.tools.request import Tool, ToolWish

Message = dict[str, Any]

_TEXT = """\
You can call functions to help with the user's request. Their signatures, one JSON object each:
<tools>
{tools}
</tools>
To call one, write this and nothing after it, with the function's name and an object of arguments:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>
Results come back between <tool_response> and </tool_response>."""
_MUST = "Reply with a function call."


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPrompt:
    """Messages for the template, the tools it is to get, and the format of calls."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    form: ToolFormat


def knows_tools(tokenizer: Tokenizer) -> ToolFormat | None:
    """The format of a template that takes tools itself; None: tools go into the messages."""
    template = tokenizer.chat_template_for(with_tools=True)
    if template is None or "tools" not in template.variables:
        return None
    return formats.detect(template.source)


def tool_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], wish: ToolWish | None
) -> ToolPrompt:
    """What to render. `wish` is None where only the conversation has calls."""
    own = knows_tools(tokenizer)
    if own is not None:
        tools = None if wish is None else [_plain(tool) for tool in wish.tools]
        return ToolPrompt(messages=list(messages), tools=tools, form=own)
    written = _flattened(messages)
    if wish is not None:
        written = _with_system(written, _text(wish))
    return ToolPrompt(messages=written, tools=None, form=formats.HERMES)


def _plain(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _text(wish: ToolWish) -> str:
    signatures = [json.dumps(_plain(tool)["function"], ensure_ascii=False) for tool in wish.tools]
    text = _TEXT.format(tools="\n".join(signatures))
    return f"{text}\n{_MUST}" if wish.required else text


def _with_system(messages: list[Message], text: str) -> list[Message]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    content = first["content"]
    joined = f"{content}\n\n{text}" if isinstance(content, str) else [*content, _part(text)]
    return [first | {"content": joined}, *messages[1:]]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _flattened(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text; results in a row are one message, for roles take turns."""
    written: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{_as_text(message['content'])}\n</tool_response>"
            if after_result:
                written[-1]["content"] += "\n" + text
            else:
                written.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = "\n".join(_call(call["function"]) for call in message["tool_calls"])
            content = _as_text(message.get("content"))
            kept = {k: v for k, v in message.items() if k != "tool_calls"}
            written.append(kept | {"content": f"{content}\n{calls}" if content else calls})
        else:
            written.append(dict(message))
        after_result = is_result
    return written


def _call(function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'


def _as_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or ""
