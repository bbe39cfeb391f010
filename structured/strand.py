"""The part of grammars in a step: a matcher goes with each constrained sequence.

A sequence waits until its grammar is open, which happens on a helper thread. From then on until
it ends, parked or not, its matcher stands where its output ends: it is advanced by each token that
is appended, and by nothing else. Masks are filled on another helper thread while the forward pass
runs. Who drafts tokens asks here what the grammar forces, and what it forbids.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from plait.platform.core import CompiledGrammar, Sequence, SequenceState
from plait.platform.errors import BadRequest, GrammarFault, GrammarTooComplex, PlaitError
from plait.platform.strand import Strand
from plait.structured.masks import MaskEntry, MaskFiller
from plait.structured.matcher import MatcherStore
from plait.structured.patience import Patience

if TYPE_CHECKING:
    import torch

    from plait.platform.core import StepPlan
    from plait.platform.strand import Veto
    from plait.structured.masks import MaskJob, StepMasks
    from plait.structured.matcher import Matcher
    from plait.structured.vocabulary import Vocabulary

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

_MAX_VOCABULARIES = 8  # the model's own, and those of adapters that add tokens
_MAX_TOO_DEAR = 1024  # grammars that are remembered for it
_COUNTED = ("grammar_sequences", "grammar_opens", "grammar_faults", "mask_rows")


@dataclass(slots=True)
class _Held:
    """What a sequence holds from its first admission until it ends."""

    sequence: Sequence
    matcher: Matcher
    patience: Patience = field(default_factory=Patience)
    fault: PlaitError | None = None  # it must end in the next step


class GrammarStrand(Strand):
    """Implements `platform.strand.Strand`.

    `vocabulary` makes the model's own; it is called on a helper thread once the first grammar
    comes, as the libraries are loaded then: a server without grammars pays for neither.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        store: MatcherStore | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock` counts the processor time of the thread that asks."""
        self._make_vocabulary = vocabulary
        self._vocabularies: dict[str, Vocabulary] = {}  # the model's under "", used by the opener
        self._store = store or MatcherStore()
        self._opener: ThreadPoolExecutor | None = None
        self._opening: dict[int, tuple[Sequence, Future[Matcher]]] = {}
        self._held: dict[int, _Held] = {}
        self._too_dear: OrderedDict[str, GrammarTooComplex] = OrderedDict()  # by grammars' keys
        self._clock = clock
        self._filler = MaskFiller(clock)
        self._job: MaskJob | None = None  # that may be using matchers
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._open_seconds = self._mask_seconds = self._wait_seconds = 0.0

    def warm(self) -> None:
        """Load the libraries now, before there is anybody to be kept waiting.

        That takes a second, and for much of it other threads stand still.
        """
        from plait.structured.backends.xgrammar import load_library

        load_library(light=True)
        vocabulary = self._vocabularies[""] = self._make_vocabulary()
        self._vocabularies[vocabulary.digest] = vocabulary
        if vocabulary.end_ids:
            self._store.warm(vocabulary)

    # --- whether a sequence may run ---

    def admit(self, sequence: Sequence) -> bool:
        """See `Strand.admit`: not yet, while its grammar is opened."""
        grammar = sequence.request.grammar
        if grammar is None or sequence.seq_id in self._held:
            return True
        if grammar.key in self._too_dear:
            raise self._too_dear[grammar.key]
        if sequence.seq_id not in self._opening:
            self._opening[sequence.seq_id] = (sequence, self._open(grammar))
        _, opened = self._opening[sequence.seq_id]
        if not opened.done():
            return False
        del self._opening[sequence.seq_id]
        self._counts["grammar_sequences"] += 1
        self._held[sequence.seq_id] = _Held(sequence, self._given(opened))
        return True

    def release(self, sequence: Sequence) -> None:
        """See `Strand.release`: a sequence that will go on keeps its matcher."""
        if sequence.state is not SequenceState.FINISHED:
            return
        self._held.pop(sequence.seq_id, None)
        opening = self._opening.pop(sequence.seq_id, None)
        if opening is not None:
            opening[1].cancel()

    @property
    def busy(self) -> bool:
        """See `Strand.busy`."""
        return bool(self._opening)

    def wait(self, timeout_s: float) -> None:
        """See `Strand.wait`."""
        pending = [opened for _, opened in self._opening.values() if not opened.done()]
        if len(pending) == len(self._opening):
            wait_for(pending, timeout_s, FIRST_COMPLETED)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """See `Strand.check_integrity`: beside those that run, those that parked keep theirs."""
        for sequence in running:
            held = sequence.seq_id in self._held
            assert held == (sequence.request.grammar is not None), "runs without its matcher"
        assert not self._held.keys() & self._opening.keys(), "opened twice"
        for held_one in self._held.values():
            sequence = held_one.sequence
            assert sequence.state is not SequenceState.FINISHED, "a matcher has leaked"
            at = held_one.matcher.num_tokens
            assert at == sequence.num_output_tokens, "a matcher is not where its output ends"
        for sequence, _ in self._opening.values():
            assert sequence.state is not SequenceState.FINISHED, "an opening has leaked"

    # --- a step ---

    def stage(self, plan: StepPlan) -> GrammarMasks | None:
        """See `Strand.stage`: begins to fill the masks of the constrained rows."""
        entries: list[MaskEntry] = []
        places: list[int] = []
        faults: dict[int, PlaitError] = {}
        staged: list[_Held] = []
        first_row = 0
        for place, span in enumerate(plan.spans):
            if span.num_samples and span.sequence.request.grammar is not None:
                held = self._held[span.sequence.seq_id]
                fault = held.fault or self._too_dear.get(span.sequence.request.grammar.key)
                if fault is not None:
                    faults[place] = fault
                else:
                    places.append(place)
                    staged.append(held)
                    entries.append(
                        MaskEntry(matcher=held.matcher, first_row=first_row, drafts=span.drafts)
                    )
            first_row += span.num_samples
        if not entries and not faults:
            return None
        self._join()
        self._job = self._filler.start(entries, first_row)
        return GrammarMasks(self._job, entries, places, faults, partial(self._masked, staged))

    def commit(self, sequence: Sequence, token_id: int) -> bool:
        """See `Strand.commit`: complete once nothing but an end may follow."""
        held = self._held.get(sequence.seq_id)
        if held is None:
            return False
        self._join()
        held.patience.token()
        try:
            with self._counted(held):
                if not held.matcher.accept(token_id):
                    raise GrammarFault("the grammar refuses a token that its mask allowed")
                return held.matcher.finished
        except Exception as error:
            raise self._fault(held.sequence, error) from error

    # --- drafts ---

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        """Up to `limit` tokens of the text that the grammar forces, as the model would spell it."""
        held = self._unbroken(sequence)
        if held is None or limit <= 0:
            return []
        self._join()
        try:
            with self._counted(held):
                return held.matcher.forced_tokens(limit)
        except Exception as error:  # noqa: BLE001 (the next step ends the sequence with it)
            held.fault = self._fault(sequence, error)
            return []

    def count_legal(self, sequence: Sequence, drafts: SequenceOf[int]) -> int:
        """How many of `drafts` the grammar allows, one behind the other."""
        if sequence.request.grammar is None:
            return len(drafts)
        held = self._unbroken(sequence)
        if held is None:
            return 0
        self._join()
        try:
            with self._counted(held):
                return held.matcher.count_legal(drafts)
        except Exception as error:  # noqa: BLE001 (the next step ends the sequence with it)
            held.fault = self._fault(sequence, error)
            return 0

    def forbid(self, sequence: Sequence, drafts: tuple[int, ...], logits: Floats) -> bool:
        """Set to -inf, in fp32 [V], what may not follow `drafts`; False where nothing may."""
        if sequence.request.grammar is None:
            return True
        held = self._unbroken(sequence)
        if held is None:
            return False
        self._join()
        try:
            with self._counted(held):
                allowed = held.matcher.allowed_after(drafts)
        except Exception as error:  # noqa: BLE001 (the next step ends the sequence with it)
            held.fault = self._fault(sequence, error)
            return False
        if allowed is None:
            return False
        known = min(len(allowed), len(logits))
        logits[:known][~allowed[:known]] = -np.inf
        logits[known:] = -np.inf
        return True

    def _unbroken(self, sequence: Sequence) -> _Held | None:
        held = self._held.get(sequence.seq_id)
        return held if held is not None and held.fault is None else None

    # --- figures ---

    @property
    def figures(self) -> dict[str, Any]:
        """See `Strand.figures`."""
        return {
            **self._counts,
            "grammar_open_seconds": self._open_seconds,
            "grammar_bytes": self._store.num_bytes,
            "mask_seconds": self._mask_seconds,
            "mask_wait_seconds": self._wait_seconds,
        }

    def close(self) -> None:
        """End the helper threads."""
        self._filler.close()
        if self._opener is not None:
            self._opener.shutdown(cancel_futures=True)

    # --- inside ---

    def _open(self, grammar: CompiledGrammar) -> Future[Matcher]:
        vocabulary = self._vocabularies.get(grammar.vocabulary)
        if vocabulary is not None and self._store.is_loaded(grammar, vocabulary):
            opened: Future[Matcher] = Future()
            opened.set_result(self._store.open(grammar, vocabulary))
            return opened
        if self._opener is None:
            self._opener = ThreadPoolExecutor(1, thread_name_prefix="grammar-open")
        return self._opener.submit(self._load, grammar)

    def _load(self, grammar: CompiledGrammar) -> Matcher:
        """On the opener's thread."""
        began = time.perf_counter()
        matcher = self._store.open(grammar, self._vocabulary(grammar))
        self._open_seconds += time.perf_counter() - began
        self._counts["grammar_opens"] += 1
        return matcher

    def _vocabulary(self, grammar: CompiledGrammar) -> Vocabulary:
        """That which the grammar was compiled for; on the opener's thread."""
        found = self._vocabularies.get(grammar.vocabulary)
        if found is not None:
            return found
        base = self._vocabularies.get("")
        if base is None:
            base = self._vocabularies[""] = self._make_vocabulary()
        vocabulary = base.with_added(grammar.added_tokens)
        if vocabulary.digest != grammar.vocabulary:
            raise GrammarFault("the grammar was compiled for another vocabulary than the model's")
        while len(self._vocabularies) > _MAX_VOCABULARIES:
            self._vocabularies.pop(next(name for name in self._vocabularies if name))
        self._vocabularies[vocabulary.digest] = vocabulary
        return vocabulary

    def _given(self, opened: Future[Matcher]) -> Matcher:
        try:
            return opened.result()
        except PlaitError as error:
            self._counts["grammar_faults"] += not isinstance(error, BadRequest)
            raise
        except Exception as error:
            log.exception("a grammar could not be opened")
            self._counts["grammar_faults"] += 1
            raise GrammarFault(f"the grammar could not be opened: {error}") from error

    def _join(self) -> None:
        """Wait for masks that were left in the making, as a forward pass failed."""
        if self._job is not None:
            self._job.result()
            self._job = None

    def _masked(
        self, staged: list[_Held], masks: StepMasks, waited_s: float
    ) -> dict[int, PlaitError]:
        """Count what masks took; returns the errors of entries, by number."""
        self._job = None
        self._counts["mask_rows"] += int((masks.mask_rows >= 0).sum())
        self._mask_seconds += masks.seconds
        self._wait_seconds += waited_s
        errors = {n: self._fault(staged[n].sequence, e) for n, e in masks.faults.items()}
        for number, (held, cost) in enumerate(zip(staged, masks.costs, strict=True)):
            try:
                held.patience.take(cost)
            except GrammarTooComplex as error:
                errors[number] = self._fault(held.sequence, error)
        return errors

    @contextmanager
    def _counted(self, held: _Held) -> Iterator[None]:
        """Count what the engine's own thread does for a grammar. Raises `GrammarTooComplex`."""
        began = self._clock()
        yield
        held.patience.take(self._clock() - began)

    def _fault(self, sequence: Sequence, error: Exception) -> PlaitError:
        grammar = sequence.request.grammar
        assert grammar is not None
        self._forget(grammar)
        if isinstance(error, GrammarTooComplex):  # the client's, not ours
            log.warning("request %s: its grammar takes too long", sequence.request.request_id)
            self._too_dear[grammar.key] = error
            while len(self._too_dear) > _MAX_TOO_DEAR:
                self._too_dear.popitem(last=False)
            return error
        self._counts["grammar_faults"] += 1
        log.error("request %s: its grammar failed", sequence.request.request_id, exc_info=error)
        return error if isinstance(error, GrammarFault) else GrammarFault(str(error))

    def _forget(self, grammar: CompiledGrammar) -> None:
        vocabulary = self._vocabularies.get(grammar.vocabulary)
        if vocabulary is not None:
            self._store.forget(grammar, vocabulary)


class GrammarMasks:
    """Implements `platform.strand.RowMasks` for one plan."""

    def __init__(
        self,
        job: MaskJob,
        entries: list[MaskEntry],
        places: list[int],
        faults: Mapping[int, PlaitError],
        on_made: Callable[[StepMasks, float], Mapping[int, PlaitError]],
    ) -> None:
        self._job = job
        self._vetoing = {entry.first_row: entry for entry in entries if entry.matcher.can_veto}
        self._places = places
        self._faults = faults
        self._on_made = on_made
        self._masks: StepMasks | None = None

    def wait(self) -> Mapping[int, PlaitError]:
        """See `RowMasks.wait`."""
        began = time.perf_counter()
        self._masks = masks = self._job.result()
        errors = self._on_made(masks, time.perf_counter() - began)
        return {**self._faults, **{self._places[number]: e for number, e in errors.items()}}

    def masked(self, first_row: int, num_rows: int) -> list[bool]:
        """See `RowMasks.masked`."""
        assert self._masks is not None, "not waited for"
        rows: list[bool] = (self._masks.mask_rows[first_row : first_row + num_rows] >= 0).tolist()
        return rows

    def apply(self, logits: torch.Tensor, first_row: int) -> None:
        """See `RowMasks.apply`."""
        assert self._masks is not None, "not waited for"
        self._masks.apply(logits, first_row)

    def veto(self, row: int) -> Veto | None:
        """See `RowMasks.veto`."""
        for first, entry in self._vetoing.items():
            if first <= row <= first + len(entry.drafts):
                drafts = entry.drafts[: row - first]
                return lambda token: entry.matcher.vetoes(token, drafts)
        return None
