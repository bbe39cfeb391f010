"""Tokenizers with tokens of an adapter in them, as if that had been saved with them.

Tokens may be new, stand in the place of others (as reserved ones do that training gave a name), or
be known words that are added tokens from now on. Each such tokenizer has a vocabulary of its own,
so only the most recently used few are kept; the others are made again when they are needed.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from plait.platform.errors import InvalidAdapter

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from plait.adapters.info import AddedToken

Tokens = tuple["AddedToken", ...]
_MOST = 8  # of a large vocabulary each takes some 100 MB


class ExtendedBackends:
    """Backends made of one, by the tokens that are added. Any thread may call."""

    def __init__(self, base: Backend) -> None:
        self._base = base
        self._known = {i: t.content for i, t in base.get_added_tokens_decoder().items()}
        self._made: OrderedDict[Tokens, Backend] = OrderedDict()
        self._lock = threading.Lock()

    def new(self, tokens: Tokens) -> Tokens:
        """Those of `tokens` that are not as they are in the base."""
        return tuple(t for t in tokens if self._known.get(t.token_id) != t.text)

    def get(self, tokens: Tokens) -> Backend:
        """The base with `tokens`. Raises `InvalidAdapter` where one cannot have its id."""
        if not tokens:
            return self._base
        with self._lock:
            made = self._made.get(tokens)
            if made is None:
                made = self._made[tokens] = extend(self._base, tokens)
                while len(self._made) > _MOST:
                    self._made.popitem(last=False)
            self._made.move_to_end(tokens)
            return made


def extend(base: Backend, tokens: Tokens) -> Backend:
    """A copy of `base` with `tokens`. Raises `InvalidAdapter` where one cannot have its id."""
    from tokenizers import Tokenizer as Backend

    state = json.loads(base.to_str())
    ids, texts = {t.token_id for t in tokens}, {t.text for t in tokens}
    added = [e for e in state["added_tokens"] if e["id"] not in ids and e["content"] not in texts]
    _rename(base, state, tokens)
    state["added_tokens"] = sorted([*added, *map(_entry, tokens)], key=lambda entry: entry["id"])
    made: Backend = Backend.from_str(json.dumps(state))
    for entry in state["added_tokens"]:
        got = made.token_to_id(entry["content"])
        if got != entry["id"]:
            raise InvalidAdapter(
                f"the adapter's tokenizer gives {entry['content'][:50]!r} the id {entry['id']}, "
                f"which does not fit this model's tokenizer: there it would have {got}"
            )
    return made


def _entry(token: AddedToken) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "content": token.text,
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": token.normalized,
        "special": token.special,
    }


def _rename(base: Backend, state: dict[str, Any], tokens: Tokens) -> None:
    """Added tokens may be in the model's vocabulary as well: there they get their new text."""
    vocab = state["model"].get("vocab")
    added = base.get_added_tokens_decoder()
    renamed: dict[str, int] = {}
    for token in tokens:
        known, other = added.get(token.token_id), base.token_to_id(token.text)
        before = base.id_to_token(token.token_id) if known is None else known.content
        if before == token.text:
            continue
        if other is not None and other not in added:
            raise _of_another_model(token, f"that is {other} in this model's")
        if before is not None and token.token_id not in added:
            raise _of_another_model(token, f"which is {before[:50]!r} in this model's")
        if isinstance(vocab, dict) and before is not None and vocab.get(before) == token.token_id:
            del vocab[before]
            renamed[token.text] = token.token_id
        elif isinstance(vocab, list) and token.token_id < len(vocab):
            vocab[token.token_id][0] = token.text
    if renamed:
        vocab.update(renamed)


def _of_another_model(token: AddedToken, why: str) -> InvalidAdapter:
    return InvalidAdapter(
        f"the adapter's tokenizer gives {token.text[:50]!r} the id {token.token_id}, {why}: "
        "it was made for another one"
    )
