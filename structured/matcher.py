"""The state of one sequence in its grammar, the same for every backend.

End tokens, ids without bytes and counts are dealt with here, so that a parser is only asked what
all libraries answer alike. A matcher belongs to one sequence and to one thread at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.platform.errors import GrammarTooComplex, InternalError, PlaitError
from plait.structured import backends
from plait.structured.backends import Backend, Grammar, Parser, ParserFault
from plait.structured.cache import MemoryCache
from plait.structured.forced import forced_tokens
from plait.structured.unique import Uniqueness

if TYPE_CHECKING:
    from plait.structured.spec import CompiledGrammar
    from plait.structured.vocabulary import Mask, Vocabulary

_MAX_BYTES_PER_DRAFT = 64  # of forced text that is looked at
_BOUND_WORDS = ("too many", "too large", "limit", "fuel")
_MAX_VOCABULARIES = 8  # the base model's and those of adapters that add tokens


class Matcher:
    """Which tokens may follow what a sequence has, and what it has.

    Methods raise `InternalError` where the backend breaks down, and `GrammarTooComplex` where it
    meets a bound of its own; the sequence must end then.

    What no grammar holds is not in the masks: `vetoes` tells of one token whether it may follow.
    """

    def __init__(
        self, parser: Parser, vocabulary: Vocabulary, unique: Uniqueness | None = None
    ) -> None:
        self._parser = parser
        self._unique = unique
        self.vocabulary = vocabulary
        self._num_tokens = 0
        self._ended = False  # the last token was an end token, which the parser has not seen
        self._finished: bool | None = None  # of this place; None: not asked yet

    def fill(self, mask: Mask) -> bool:
        """Write the allowed tokens into an int32 row [W]; False: all are, the row is untouched.

        An end token is among them where the text may end. Padding never is. After an end token
        only end tokens are.
        """
        if self._ended:
            mask[:] = self.vocabulary.end_mask
            return True
        needed = self._guarded_fill(mask)
        if needed and not np.count_nonzero(mask):
            raise InternalError("the grammar has led into a place from which nothing can follow")
        return needed

    def count_legal(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` may follow in a row; none behind an end token. Changes nothing."""
        plain = self._before_end(drafts)
        try:
            num_legal = self._count_legal(plain)
            if num_legal < len(plain) or num_legal == len(drafts) or self._ended:
                return num_legal
            if drafts[num_legal] not in self.vocabulary.end_ids:
                return num_legal
            return num_legal + self._may_end_after(plain)
        except ParserFault as error:
            raise _fault(error) from error

    @property
    def can_veto(self) -> bool:
        """Whether `vetoes` could ever be true."""
        return self._unique is not None

    def vetoes(self, token: int, drafts: Sequence[int] = ()) -> bool:
        """Whether a token that the mask allows may still not follow, behind legal `drafts`."""
        if self._unique is None or not 0 <= token < len(self.vocabulary.pieces):
            return False
        if token in self.vocabulary.end_ids:
            return False
        pieces = self.vocabulary.pieces
        return self._unique.vetoes(pieces[token], [pieces[draft] for draft in drafts])

    def fill_drafts(self, drafts: Sequence[int], masks: Mask) -> int:
        """Write into row i of int32 [K+1, W] what may follow drafts[:i]; return how many are legal.

        Rows 0 … that number are written. A row in which everything is allowed is all ones. The
        state stays as it was.
        """
        num_legal = self.count_legal(drafts)
        before, finished = self._num_tokens, self._finished
        try:
            for i in range(num_legal + 1):
                if i and not self.accept(drafts[i - 1]):
                    raise InternalError("a draft is refused that was found legal")
                if not self.fill(masks[i]):
                    masks[i] = -1
        finally:
            self.rollback(self._num_tokens - before)
            self._finished = finished
        return num_legal

    def allowed_after(self, drafts: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """Which tokens may follow `drafts`, bool [32 W]; None where these may not come, or end it.

        The state stays as it was.
        """
        before, finished = self._num_tokens, self._finished
        words: Mask = np.zeros((1, self.vocabulary.num_words), np.int32)
        try:
            if self._ended or not all(self.accept(draft) for draft in drafts) or self._ended:
                return None
            if not self.fill(words[0]):
                words[:] = -1
        finally:
            self.rollback(self._num_tokens - before)
            self._finished = finished
        return np.unpackbits(words[0].view(np.uint8), bitorder="little").astype(np.bool_)

    def accept(self, token: int) -> bool:
        """Advance by a token; False where it may not follow, and nothing has changed then."""
        if self._ended or not 0 <= token < len(self.vocabulary.pieces):
            return False
        if token in self.vocabulary.end_ids:
            accepted = self._ended = self.can_end
        elif not self.vocabulary.pieces[token]:
            return False
        else:
            try:
                accepted = self._accept(token)
            except ParserFault as error:
                raise _fault(error) from error
        if accepted:
            self._num_tokens += 1
            self._finished = None
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens. Raises ValueError where there are fewer."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot undo {num_tokens} of {self._num_tokens} tokens")
        if num_tokens == 0:
            return
        self._num_tokens -= num_tokens
        if self._ended:
            num_tokens -= 1
            self._ended = False
        if num_tokens:
            if self._unique is not None:
                self._unique.rollback(num_tokens)
            try:
                self._parser.rollback(num_tokens)
            except (ParserFault, RuntimeError) as error:
                raise _fault(error) from error
        self._finished = None

    @property
    def num_tokens(self) -> int:
        """Tokens accepted and not undone."""
        return self._num_tokens

    @property
    def can_end(self) -> bool:
        """Whether an end token may come now."""
        try:
            return not self._ended and self._parser.complete
        except ParserFault as error:
            raise _fault(error) from error

    @property
    def finished(self) -> bool:
        """Whether an end token has come, or nothing but one may: no forward pass is needed."""
        if self._ended:
            return True
        if self._finished is None:
            self._finished = self.can_end and self._only_ends()
        return self._finished

    def forced_tokens(self, limit: int) -> list[int]:
        """At most `limit` tokens that must follow, as the model would spell them; [] if none do."""
        if limit <= 0 or self._ended:
            return []
        try:
            forced = self._parser.forced_bytes()
        except ParserFault as error:
            raise _fault(error) from error
        if not forced:
            return []
        if len(forced) > (most := limit * _MAX_BYTES_PER_DRAFT):
            # It may go on for megabytes, and to encode these would take longer than any step.
            tokens = forced_tokens(self.vocabulary, forced[:most], open_end=True)
            return tokens[: min(limit, self.count_legal(tokens))]
        closed = forced_tokens(self.vocabulary, forced, open_end=False)
        num_legal = self.count_legal(closed)
        if num_legal == len(closed) and self._may_end_after(closed):
            return closed[:limit]
        tokens = forced_tokens(self.vocabulary, forced, open_end=True)
        return tokens[: min(limit, num_legal)]

    def copy(self) -> Matcher:
        """An independent matcher at the same place."""
        unique = None if self._unique is None else self._unique.copy()
        other = Matcher(self._parser.copy(), self.vocabulary, unique)
        other._num_tokens, other._ended = self._num_tokens, self._ended
        other._finished = self._finished
        return other

    def _count_legal(self, plain: list[int]) -> int:
        num_legal = self._parser.count_legal(plain)
        if self._unique is None:
            return num_legal
        pieces = self.vocabulary.pieces
        return self._unique.count_legal([pieces[token] for token in plain[:num_legal]])

    def _accept(self, token: int) -> bool:
        if self._unique is None:
            return self._parser.accept(token)
        if not self._parser.accept(token):
            return False
        if self._unique.accept(self.vocabulary.pieces[token]):
            return True
        self._parser.rollback(1)
        return False

    def _guarded_fill(self, mask: Mask) -> bool:
        try:
            return self._parser.fill(mask)
        except ParserFault as error:
            raise _fault(error) from error

    def _before_end(self, drafts: Sequence[int]) -> list[int]:
        """The drafts in front of the first that a parser must not be given."""
        pieces, ends = self.vocabulary.pieces, self.vocabulary.end_ids
        plain: list[int] = []
        for token in () if self._ended else drafts:
            if not 0 <= token < len(pieces) or token in ends or not pieces[token]:
                break
            plain.append(token)
        return plain

    def _may_end_after(self, tokens: list[int]) -> bool:
        """Whether an end token may follow `tokens`, which are legal."""
        num_accepted = 0
        try:
            for token in tokens:
                num_accepted += self._parser.accept(token)
            return num_accepted == len(tokens) and self._parser.complete
        finally:
            if num_accepted:
                self._parser.rollback(num_accepted)

    def _only_ends(self) -> bool:
        row = np.zeros(self.vocabulary.num_words, np.int32)
        if not self._guarded_fill(row):
            return False
        return not (row & ~self.vocabulary.end_mask).any()


class MatcherStore:
    """Opens matchers; keeps the grammars used last, by content, and a backend per vocabulary.

    Thread-safe. Opening a grammar for the first time may take some 100 ms, so that belongs on a
    helper's thread; `warm` takes the start-up of the libraries off the first request.
    """

    def __init__(self, *, budget_bytes: int = 512 << 20) -> None:
        self._grammars: MemoryCache[Grammar] = MemoryCache(budget_bytes)
        self._backends: OrderedDict[tuple[str, str], Backend] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, compiled: CompiledGrammar, vocabulary: Vocabulary) -> Matcher:
        """A matcher at the beginning of the grammar.

        Raises `InternalError` where the backend cannot load what its compiler made.
        """
        key = f"{compiled.key}{vocabulary.digest}"
        grammar = self._grammars.get(key)
        try:
            if grammar is None:
                grammar = self._backend(compiled.backend, vocabulary).load(compiled.payload)
                self._grammars.put(key, grammar, compiled.num_bytes)
            unique = Uniqueness(compiled.checks) if compiled.checks else None
            return Matcher(grammar.parser(), vocabulary, unique)
        except ParserFault as error:
            raise _fault(error) from error

    def is_loaded(self, compiled: CompiledGrammar, vocabulary: Vocabulary) -> bool:
        """Whether `open` takes microseconds."""
        return self._grammars.get(f"{compiled.key}{vocabulary.digest}") is not None

    def forget(self, compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
        """Load the grammar anew next time; for one whose matcher has broken down."""
        self._grammars.discard(f"{compiled.key}{vocabulary.digest}")

    def warm(self, vocabulary: Vocabulary) -> None:
        """Load the libraries and make their forms of the vocabulary."""
        for name in backends.NAMES:
            self._backend(name, vocabulary)

    @property
    def num_bytes(self) -> int:
        """Bytes of the grammars kept, about."""
        return self._grammars.num_bytes

    def _backend(self, name: str, vocabulary: Vocabulary) -> Backend:
        key = (name, vocabulary.digest)
        with self._lock:
            backend = self._backends.get(key)
            if backend is None:
                backend = self._backends[key] = backends.create(name, vocabulary)
                while len(self._backends) > _MAX_VOCABULARIES * len(backends.NAMES):
                    self._backends.popitem(last=False)
            self._backends.move_to_end(key)
            return backend


def _fault(error: Exception) -> PlaitError:
    """A bound of the library's on what it builds is the grammar's fault; anything else is ours."""
    text = str(error).lower()
    if any(word in text for word in _BOUND_WORDS):
        return GrammarTooComplex(
            f"the grammar is beyond what its library can follow on this text ({error}): simplify it"
        )
    return InternalError(f"the grammar's matcher broke down: {error}")
