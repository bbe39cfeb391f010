"""What the tokenizer that training saved beside an adapter adds to the model's.

Tokens, an end token and a chat template, from whichever of transformers' files have them:

    tokenizer.json              added_tokens, with ids; what newer versions write
    tokenizer_config.json       added_tokens_decoder, eos_token, chat_template
    special_tokens_map.json     which tokens are special, eos_token
    added_tokens.json           text → id; what slow tokenizers write
    chat_template.jinja

The store keeps one file in their place, `tokenizer_config.json` in a canonical form. Reading that
gives the same again. Knows no torch, and no tokenizers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plait.adapters.files import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileLimits,
    parse_json,
    read_small,
)
from plait.adapters.info import AddedToken
from plait.platform.errors import InvalidAdapter

_MAX_TOKENS = 65_536
_MAX_TOKEN_LENGTH = 1024
_MAX_TEMPLATE = 256 << 10
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokenizer:
    """What an adapter's own tokenizer says; tokens of the model may stand among its tokens."""

    added_tokens: tuple[AddedToken, ...] = ()  # by id
    end_token: str | None = None
    chat_template: str | None = None


def read_own_tokenizer(
    folder: int, limits: FileLimits, *, follow_links: bool = False
) -> bytes | None:
    """The canonical file of an adapter's open directory; None where nothing says anything.

    Raises `InvalidAdapter` where the files contradict each other or are none.
    """
    found: dict[str, bytes] = {}
    for name in (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE):
        with contextlib.suppress(FileNotFoundError):
            limit = limits.of(name)
            found[name] = read_small(folder, name, limit=limit, follow_links=follow_links)
    own = _Reader(found, limits).read()
    return None if own == OwnTokenizer() else _canonical(own)


def parse_own_tokenizer(data: bytes | None, limits: FileLimits | None = None) -> OwnTokenizer:
    """What `read_own_tokenizer` gave."""
    if data is None:
        return OwnTokenizer()
    return _Reader({TOKENIZER_CONFIG: data}, limits or FileLimits()).read()


def _canonical(own: OwnTokenizer) -> bytes:
    content: dict[str, Any] = {}
    if own.added_tokens:
        content["added_tokens_decoder"] = {
            str(token.token_id): {
                "content": token.text,
                **{flag: getattr(token, flag) for flag in _FLAGS},
            }
            for token in own.added_tokens
        }
    if own.end_token is not None:
        content["eos_token"] = own.end_token
    if own.chat_template is not None:
        content["chat_template"] = own.chat_template
    return json.dumps(content, sort_keys=True).encode()


class _Reader:
    """The files of one directory, put together as transformers does."""

    def __init__(self, files: Mapping[str, bytes], limits: FileLimits) -> None:
        self._files = files
        self._limits = limits
        self._config = self._object(TOKENIZER_CONFIG)
        self._map = self._object(SPECIAL_TOKENS)

    def read(self) -> OwnTokenizer:
        """All of it, checked."""
        return OwnTokenizer(
            added_tokens=self._tokens(),
            end_token=_text_of(self._config.get("eos_token"))
            or _text_of(self._map.get("eos_token")),
            chat_template=self._template(),
        )

    def _object(self, name: str) -> Mapping[str, Any]:
        if name not in self._files:
            return {}
        content = parse_json(self._files[name], name, self._limits)
        if not isinstance(content, dict):
            raise InvalidAdapter(f"{name} is not a JSON object")
        return content

    def _tokens(self) -> tuple[AddedToken, ...]:
        by_id: dict[int, AddedToken] = {}
        by_text: dict[str, int] = {}
        for source, token in self._listed():
            id_ = by_text.setdefault(token.text, token.token_id)
            known = by_id.setdefault(token.token_id, token)
            if id_ != token.token_id or known.text != token.text:
                raise InvalidAdapter(
                    f"{source}: {token.text[:50]!r} with the id {token.token_id} contradicts "
                    f"{known.text[:50]!r} with the id {id_} beside it"
                )
            if source == TOKENIZER_CONFIG:  # its flags count, as in transformers
                by_id[token.token_id] = token
            if len(by_id) > _MAX_TOKENS:
                raise InvalidAdapter(f"{source} adds more than {_MAX_TOKENS:,} tokens")
        return tuple(by_id[id_] for id_ in sorted(by_id))

    def _listed(self) -> Iterator[tuple[str, AddedToken]]:
        for entry in self._in_tokenizer():
            yield TOKENIZER, _token(TOKENIZER, entry, entry.get("id"))
        decoder = self._config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise InvalidAdapter(f"{TOKENIZER_CONFIG}: added_tokens_decoder maps ids to tokens")
        for id_, entry in decoder.items():
            number = int(id_) if id_.isdecimal() and len(id_) < 10 else None
            yield TOKENIZER_CONFIG, _token(TOKENIZER_CONFIG, entry, number)
        special = set(self._special())
        for text, id_ in self._object(ADDED_TOKENS).items():
            flags = {"special": text in special, "normalized": text not in special}
            yield ADDED_TOKENS, _token(ADDED_TOKENS, {"content": text, **flags}, id_)

    def _in_tokenizer(self) -> list[Mapping[str, Any]]:
        if TOKENIZER not in self._files:
            return []
        try:
            entries = _member(self._files[TOKENIZER].decode("utf-8"), "added_tokens")
            json.dumps(entries, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise InvalidAdapter(f"{TOKENIZER} is not JSON: {str(error)[:200]}") from None
        if entries is None:
            return []
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise InvalidAdapter(f"{TOKENIZER}: added_tokens is a list of tokens")
        return entries

    def _special(self) -> Iterator[str]:
        """Texts of tokens that have a name, or are listed as special."""
        for content in (self._config, self._map):
            listed = content.get("additional_special_tokens")
            for value in (*map(content.get, _NAMED), *(listed if isinstance(listed, list) else ())):
                text = _text_of(value)
                if text is not None:
                    yield text

    def _template(self) -> str | None:
        value = self._config.get("chat_template")
        if isinstance(value, list):  # several, by name
            named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
            value = named.get("default")
        if CHAT_TEMPLATE in self._files:
            try:
                value = self._files[CHAT_TEMPLATE].decode("utf-8")
            except UnicodeDecodeError:
                raise InvalidAdapter(f"{CHAT_TEMPLATE} is not UTF-8") from None
        if not value:
            return None
        if not isinstance(value, str) or len(value) > _MAX_TEMPLATE:
            raise InvalidAdapter(
                f"a chat template is text of at most {_MAX_TEMPLATE} characters",
                param="chat_template",
            )
        return value


def _token(source: str, entry: Any, token_id: Any) -> AddedToken:
    text = entry.get("content") if isinstance(entry, dict) else None
    is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < 1 << 31
    if not is_id or not isinstance(text, str) or not 0 < len(text) <= _MAX_TOKEN_LENGTH:
        raise InvalidAdapter(
            f"{source} gives each token's text, of at most {_MAX_TOKEN_LENGTH} characters, an id "
            "of its own"
        )
    flags = {flag: entry.get(flag, False) for flag in _FLAGS}
    if not all(isinstance(value, bool) for value in flags.values()):
        raise InvalidAdapter(f"{source}: {text[:50]!r}: {', '.join(_FLAGS)} are true or false")
    return AddedToken(token_id=token_id, text=text, **flags)


def _text_of(value: Any) -> str | None:
    """A named token: its text, or an object with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and 0 < len(text) <= _MAX_TOKEN_LENGTH else None


def _member(text: str, wanted: str) -> Any:
    """A member of a JSON object, without parsing what stands behind it: megabytes, here.

    Raises ValueError where it is no JSON so far.
    """
    decode = json.JSONDecoder().raw_decode

    def behind(at: int, char: str) -> int:
        at = _skip(text, at)
        if text[at : at + 1] != char:
            raise ValueError(f"{char} is wanted at character {at}")
        return _skip(text, at + 1)

    at = behind(0, "{")
    while text[at : at + 1] != "}":
        name, at = decode(text, at)
        value, at = decode(text, behind(at, ":"))
        if name == wanted:
            return value
        at = _skip(text, at)
        if text[at : at + 1] != "}":
            at = behind(at, ",")
    return None


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
