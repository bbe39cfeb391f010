"""What may follow sequences: what promises most of all that sources hold, as far as it is legal.

1  candidates     text that the grammar forces; behind it what the text itself, or recent
answers, suggest; or what the draft model says, where that promises more
2  legal          cut where the grammar forbids, so that no such token becomes a row
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.speculative.economy import split
from plait.speculative.model_drafts import Rival
from plait.speculative.source import Draft
from plait.speculative.tally import FORBIDDEN, NOTHING_FOUND

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.speculative.acceptance import Whose
    from plait.speculative.economy import Economy
    from plait.speculative.model_drafts import ModelDrafts
    from plait.speculative.source import Sources, TextSource, Want
    from plait.speculative.tally import Tally

FORCED = "grammar"
# Sequences from which on asking for all, 0.1 ms each, takes a share of a step that is felt.
MANY = 16

Chain = tuple[Draft, ...]  # one behind the other


class Candidates:
    """Asks an engine's sources. Texts are asked in turn; the longest that promises most wins."""

    def __init__(
        self,
        sources: Sources,
        model: ModelDrafts | None,
        economy: Economy,
        tally: Tally,
        *,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._constraints = sources.constraints
        self._texts = sources.texts
        self._model = model
        self._economy = economy
        self._tally = tally
        self._vocab_size = vocab_size
        self._clock = clock

    def of(
        self, wants: SequenceOf[Want], whose: SequenceOf[Whose], *, max_drawn: int | None
    ) -> list[Chain]:
        """For each of `wants` what may be verified; empty where there is nothing.

        `max_drawn`: where the model's drafts are drawn for rejection sampling, how many at most.
        """
        texts = self._awake(len(wants))
        chains = [self._text(w, own, texts) for w, own in zip(wants, whose, strict=True)]
        if self._model is not None:
            rivals = self._rivals(self._model, wants, whose, chains)
            self._model.improve(rivals, chains, self._promise, max_rows=max_drawn)
        legal = [self._legal(w.sequence, chain) for w, chain in zip(wants, chains, strict=True)]
        for chain, left in zip(chains, legal, strict=True):
            if not left:
                self._tally.undrafted(FORBIDDEN if chain else NOTHING_FOUND)
        return legal

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended: sources learn from it what is worth it, and forget it."""
        for text in self._texts:
            text.release(sequence)
        if self._model is not None:
            self._model.release(sequence)

    def forget(self, generation: str) -> None:
        """An adapter has gone: forget the answers that it gave."""
        for text in self._texts:
            text.forget(generation)

    # --- text ------------------------------------------------------------------------------------

    def _awake(self, num_wants: int) -> list[TextSource]:
        """The sources to ask: in a large batch not those of which nothing was chosen for long."""
        if num_wants < MANY:
            return list(self._texts)
        return [text for text in self._texts if not self._economy.ledger.is_asleep(text.name)]

    def _text(self, want: Want, whose: Whose, texts: SequenceOf[TextSource]) -> Chain:
        """Forced text, and what other text suggests behind it."""
        chain = self._forced(want)
        if chain:
            forced = chain[0].tokens
            want = replace(want, after=forced, limit=want.limit - len(forced))
            if want.limit <= 0:
                return chain
        found = [d for d in (self._ask(text, want) for text in texts) if d is not None]
        if not found:
            return chain
        if len(found) == 1:
            return (*chain, found[0])
        return (*chain, max(found, key=lambda draft: self._promise(whose, (draft,))))

    def _forced(self, want: Want) -> Chain:
        if self._constraints is None or want.sequence.request.grammar is None:
            return ()
        began = self._clock()
        tokens = tuple(self._constraints.forced(want.sequence, want.limit))
        self._tally.drafting(FORCED, self._clock() - began)
        return (Draft(tokens=tokens, source=FORCED),) if tokens else ()

    def _ask(self, text: TextSource, want: Want) -> Draft | None:
        began = self._clock()
        draft = text.propose(want)
        self._tally.drafting(text.name, self._clock() - began)
        return draft

    # --- the model -------------------------------------------------------------------------------

    def _rivals(
        self,
        model: ModelDrafts,
        wants: SequenceOf[Want],
        whose: SequenceOf[Whose],
        chains: SequenceOf[Chain],
    ) -> list[Rival]:
        """Those for which the model may be asked, in place of what stands behind forced text."""
        rivals: list[Rival] = []
        for place, (want, own, chain) in enumerate(zip(wants, whose, chains, strict=True)):
            forced = chain[:1] if chain and chain[0].source == FORCED else ()
            rest = want
            if forced:
                after = forced[0].tokens
                rest = replace(want, after=after, limit=want.limit - len(after))
            rival = model.rival(place, own, rest, forced, chain[len(forced) :])
            if rival is not None:
                rivals.append(rival)
        return rivals

    def _promise(self, whose: Whose, chain: Chain) -> float:
        """Seconds that drafts are expected to save."""
        survival: list[float] = []
        reached = 1.0
        for draft in chain:
            survival += [reached * s for s in self._economy.acceptance.survival(whose, draft)]
            reached = survival[-1]
        return self._economy.worth_s(survival) if survival else 0.0

    # --- what is legal ---------------------------------------------------------------------------

    def _legal(self, sequence: Sequence, chain: Chain) -> Chain:
        """Cut where the vocabulary or the grammar has no such token."""
        tokens = [token for draft in chain for token in draft.tokens]
        width = sequence.request.vocab_size or self._vocab_size
        num_legal = next((i for i, t in enumerate(tokens) if not 0 <= t < width), len(tokens))
        if self._constraints is not None and sequence.request.grammar is not None:
            num_legal = self._constraints.count_legal(sequence, tokens[:num_legal])
        if num_legal == len(tokens):
            return chain
        self._tally.cut(chain, num_legal, by=FORBIDDEN)
        return tuple(
            replace(draft, tokens=draft.tokens[:num], chances=draft.chances[:num])
            for draft, num in split(chain, num_legal)
        )
