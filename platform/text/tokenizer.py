"""Text to token ids and back, chat templates, and the bytes of each token.

Used in the API process, the engine process and the offline API alike, so it imports neither
torch nor transformers: `tokenizer.json` and GGUF vocabularies are read by the `tokenizers`
library alone; only a checkpoint that has neither goes through transformers' conversion.
Remote code is never run. All methods may be called from several threads at once.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest
from plait.platform.text.added_tokens import ExtendedBackends
from plait.platform.text.chat_templates import ChatTemplates
from plait.platform.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from plait.adapters.info import AddedToken
    from plait.platform.text.chat_template import ChatTemplate
    from plait.platform.text.tokenizer_files import TokenizerFiles


def _not_text(text: object, error: TypeError) -> Exception:
    """`error`, or what says which half of a surrogate pair is no text."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            half = text[broken.start].encode("ascii", "backslashreplace").decode()
            return BadRequest(
                f"the text holds {half}, half of a surrogate pair, at character {broken.start}: "
                "bytes that are no UTF-8 were decoded into it"
            )
    return error


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template; immutable once loaded."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._backends = ExtendedBackends(files.backend)
        self.added_tokens: tuple[AddedToken, ...] = ()  # see `extended`
        self._bytes = self._base_bytes = TokenBytes(files.backend)
        self._templates = files.chat_templates
        self.bos_token_id = files.bos_token_id
        self.eos_token_ids = files.eos_token_ids

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        gguf_file: str | None = None,
        chat_template: str | None = None,
        revision: str | None = None,
        compile_templates: bool = True,
    ) -> Tokenizer:
        """Load from a directory, a GGUF file, or a hub id (`HF_HUB_OFFLINE` is honoured).

        `gguf_file` names a file inside `source`. `chat_template`, a file or the template's own
        text, replaces the checkpoint's. Without `compile_templates` they are compiled when a chat
        first needs them. Raises `ModelUnsupported` where no tokenizer is found, `ConfigError` where
        a template does not compile.
        """
        from plait.platform.text.tokenizer_files import read_tokenizer_files

        files = read_tokenizer_files(
            source, gguf_file=gguf_file, chat_template=chat_template, revision=revision
        )
        if compile_templates:
            dict(files.chat_templates)
        return cls(files)

    @property
    def _backend(self) -> Backend:
        return self._backends.get(self.added_tokens)

    @property
    def vocab_size(self) -> int:
        """Highest token id + 1, added tokens included. A model's may be padded beyond it."""
        return self._bytes.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; names of special tokens in it become these tokens.

        Raises `BadRequest` for text that is no Unicode.
        """
        # A batch of one: `encode` itself holds the interpreter lock, seconds for a long text.
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _not_text(text, error) from None
        ids: list[int] = batch[0].ids
        return ids

    def decode(
        self,
        ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`. Bytes that form no character become U+FFFD, as in Python's "replace".

        `spaces_between_special_tokens` matters for tokenizers that join tokens by spaces only.
        """
        stream = self._bytes.stream(
            at_start=True,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return b"".join(map(stream.next, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to running text; may be a part of a character."""
        return self._bytes.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as logprobs show it; bytes that form no character become U+FFFD."""
        return self._bytes.piece(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """The id of the one token that is named so; None where there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def token_name(self, token_id: int) -> str | None:
        """What the vocabulary calls a token, `token_id`'s reverse."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    @property
    def bytes_table(self) -> TokenBytes:
        """The bytes of each token, for incremental detokenization."""
        return self._bytes

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return bool(self._templates)

    def chat_template_for(self, *, with_tools: bool = False) -> ChatTemplate | None:
        """The template that `render_chat` uses; None where there is none."""
        return self._template(with_tools) if self._templates else None

    def with_chat_template(self, source: str) -> Tokenizer:
        """This tokenizer with another chat template. Raises `ConfigError` where it is none."""
        other = copy.copy(self)
        other._templates = ChatTemplates({"default": source}, self._templates.special_tokens)
        other._template(with_tools=False)
        return other

    def extended(self, tokens: Iterable[AddedToken], *, end_token: str | None = None) -> Tokenizer:
        """This tokenizer with the tokens of an adapter; it is this one where they add nothing.

        `end_token` is the text of one that ends answers too. What cannot be added shows when
        text is first encoded, or by `check`.
        """
        new = self._backends.new((*self.added_tokens, *tokens))
        other = copy.copy(self)
        other.added_tokens = new
        if new != self.added_tokens:
            other._bytes = self._base_bytes.extended(new)
        ends = {t.token_id for t in new if t.text == end_token}
        if end_token is not None and not ends:
            known = self._backends.get(()).token_to_id(end_token)
            ends = set() if known is None else {known}
        other.eos_token_ids = (*self.eos_token_ids, *sorted(ends.difference(self.eos_token_ids)))
        is_same = new == self.added_tokens and other.eos_token_ids == self.eos_token_ids
        return self if is_same else other

    def within(self, width: int) -> Tokenizer:
        """This tokenizer without those added tokens that a model of so many tokens lacks."""
        if all(t.token_id < width for t in self.added_tokens):
            return self
        other = copy.copy(self)
        other.added_tokens = tuple(t for t in self.added_tokens if t.token_id < width)
        other._bytes = self._base_bytes.extended(other.added_tokens)
        other.eos_token_ids = tuple(i for i in self.eos_token_ids if i < width)
        return other

    def check(self) -> None:
        """Raise `InvalidAdapter` where a token that was added cannot have its id."""
        self._backends.get(self.added_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        allowed_kwargs: Collection[str] = (),
    ) -> str:
        """The text that the model sees; see `ChatTemplate.render`. Raises `BadRequest`."""
        return self._template(bool(tools)).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            allowed_kwargs=allowed_kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `render_chat`; the template itself writes bos and the like."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _template(self, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise BadRequest(
                "this model has no chat template: start the server with --chat-template FILE, "
                "or use /v1/completions",
                param="messages",
            )
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of `words`, each as it reads inside a word and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            variants = {self._inside(bare), self._plain(bare), self._plain(" " + bare)} - {()}
            if not bare:
                raise BadRequest(
                    f"bad_words: {word!r} is no word: ban its token by logit_bias",
                    param="bad_words",
                )
            if not variants:
                raise BadRequest(f"bad_words: {word!r} has no tokens", param="bad_words")
            found.update(dict.fromkeys(sorted(variants)))
        return tuple(found)

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode(text, add_special_tokens=False))

    def _inside(self, text: str) -> tuple[int, ...]:
        """Tokens of `text` behind a line break, where no tokenizer puts a space in front."""
        head, whole = self._plain("\n"), self._plain("\n" + text)
        return whole[len(head) :] if head and whole[: len(head)] == head else ()
