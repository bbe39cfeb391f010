"""Chat templates: Jinja in a sandbox, with the same environment as transformers gives them.

A template comes with the checkpoint and is not trusted; the messages come from a client and
are turned into plain JSON types before a template sees them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from plait.platform.errors import BadRequest, ConfigError

# What every template is given; a client's `chat_template_kwargs` cannot replace these.
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})
# Private-use characters: no message has them. The space tells whether the template trims.
_END_MARK = "\ue000END_OF_FINAL_MESSAGE\ue001"
_PROBE = "plaitprobe"


class ChatTemplate:
    """One compiled template. Thread-safe.

    `special_tokens` are the variables such as `bos_token` that templates write.
    Raises `ConfigError` where the template does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(
                jinja2.meta.find_undeclared_variables(environment.parse(source))
            )
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the chat template does not compile: {error}", param="chat_template"
            ) from error

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Text of `bos_token` and the like, as templates write it."""
        return self._special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        allowed_kwargs: Collection[str] = (),
    ) -> str:
        """The prompt's text. Raises `BadRequest` with the template's own message where it refuses.

        `template_kwargs` may hold variables that the template reads (`documents`, say); others
        must stand in `allowed_kwargs` (known to be harmless without effect), else are refused.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other: "
                "set add_generation_prompt to false",
                param="continue_final_message",
            )
        extra = self._check_kwargs(template_kwargs or {}, allowed_kwargs)
        chat = [self._message(message) for message in messages]
        if continue_final_message:
            _mark_final_message(chat)
        text = self._render(
            messages=chat,
            tools=_plain(tools) or None,
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **extra},
        )
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template reads content given as a list of parts (found by trying)."""
        part = [{"type": "text", "text": _PROBE}]
        return self._shows_probe(part)

    @cached_property
    def takes_strings(self) -> bool:
        """Whether the template reads content given as a string (found by trying)."""
        return self._shows_probe(_PROBE)

    def _shows_probe(self, content: Any) -> bool:
        try:
            text = self._render(
                messages=[{"role": "user", "content": content}],
                tools=None,
                add_generation_prompt=False,
            )
        except BadRequest:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _render(self, **variables: Any) -> str:
        try:
            return self._template.render(**self._special_tokens, **variables)
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise BadRequest(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def _check_kwargs(self, kwargs: Mapping[str, Any], allowed: Collection[str]) -> dict[str, Any]:
        reserved = _GIVEN | self._special_tokens.keys()
        for name in kwargs:
            if name in reserved or not (name in self.variables or name in allowed):
                known = ", ".join(sorted(self.variables - reserved - _GLOBALS)) or "none"
                raise BadRequest(
                    f"chat_template_kwargs: {name!r} cannot be set for this model's template; "
                    f"it reads: {known}",
                    param="chat_template_kwargs",
                )
        return {name: _plain(value) for name, value in kwargs.items()}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message in the form the template reads; keys that are null are left out.

        Many templates print None, or fail on it, where they handle a missing key.
        """
        plain: dict[str, Any] = {k: _plain(v) for k, v in message.items() if v is not None}
        content = plain.get("content")
        if isinstance(content, list) and _all_text(content) and not self.takes_parts:
            plain["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and self.takes_parts and not self.takes_strings:
            plain["content"] = [{"type": "text", "text": content}]
        return plain


def _all_text(parts: list[Any]) -> bool:
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    )


def _mark_final_message(chat: list[dict[str, Any]]) -> None:
    """Put the end mark behind the last message's text."""
    content = chat[-1].get("content") if chat else None
    part: dict[str, Any]
    if isinstance(content, str):
        part, key = chat[-1], "content"
    else:
        texts = [p for p in content or [] if isinstance(p, dict) and p.get("type") == "text"]
        if not texts:
            raise BadRequest(
                "continue_final_message needs a last message with text content",
                param="continue_final_message",
            )
        part, key = texts[-1], "text"
    part[key] = f"{part[key]}{_END_MARK} "


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END_MARK)
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template leaves out (part of) the last message",
            param="continue_final_message",
        )
    trimmed = not text.startswith(_END_MARK + " ", at)
    return text[:at].rstrip() if trimmed else text[:at]


def _plain(value: Any) -> Any:
    """`value` rebuilt from plain JSON types, so that a template can call nothing of ours."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise BadRequest(f"messages hold a {type(value).__name__}; only JSON values are possible")


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here: its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_GLOBAL_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}
_GLOBALS = frozenset(_GLOBAL_FUNCTIONS) | frozenset(jinja2.defaults.DEFAULT_NAMESPACE)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(_GLOBAL_FUNCTIONS)
    return environment
