"""The vocabulary of requests whose adapter adds tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.vocabulary import Vocabulary

_MOST = 8  # each has all tokens of the base as well


class Vocabularies:
    """One model's, and those with adapters' tokens in it, the last used. Any thread may call."""

    def __init__(self, base: Vocabulary) -> None:
        self.base = base
        # Ids that stand for nothing yet, within the base's own.
        self._holes = [i for i, piece in enumerate(base.pieces) if not piece]
        self._made: OrderedDict[tuple[tuple[int, bytes, bool], ...], Vocabulary] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, tokenizer: Tokenizer, width: int = 0) -> Vocabulary:
        """With what `tokenizer` has beyond the base, as far as logits of `width` reach."""
        end = min(tokenizer.vocab_size, max(width, self.base.width))
        ids = [*(i for i in self._holes if i < end), *range(len(self.base.pieces), end)]
        special = tokenizer.bytes_table.special_ids
        read = ((i, tokenizer.token_bytes(i), i in special) for i in ids)
        added = tuple(token for token in read if token[1])
        if not added:
            return self.base
        with self._lock:
            made = self._made.get(added)
            if made is None:
                made = self._made[added] = self.base.with_added(added)
                while len(self._made) > _MOST:
                    self._made.popitem(last=False)
            self._made.move_to_end(added)
            return made
