"""The masks of a step: a row of bits for each draft position, filled while the forward pass runs.

Both libraries fill rows without the interpreter's lock, so one helper thread does it beside the
forward; `MaskJob.result` is the only place where a step waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.platform.errors import InternalError, PlaitError
from plait.structured.matcher import Matcher

if TYPE_CHECKING:
    import torch

    from plait.structured.vocabulary import Mask

Clock = Callable[[], float]
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskEntry:
    """One constrained span of a step."""

    matcher: Matcher  # not to be used by others before the result is there
    first_row: int  # of its sample rows among those of the step
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMasks:
    """What a step's rows may become.

    A row behind an illegal draft has no mask: its draft is never the sample of the row before, so
    nobody reads it.
    """

    mask: Mask  # int32 [M, W]
    mask_rows: Rows  # int32 [R]: row of `mask`; -1: unconstrained
    num_legal: tuple[int, ...] = ()  # drafts of each entry
    # Entries whose matcher broke down: their sequences must end with the error.
    faults: dict[int, PlaitError] = field(default_factory=dict)
    costs: tuple[float, ...] = ()  # seconds of processor time of each entry
    seconds: float = 0.0  # spent filling

    def apply(self, logits: torch.Tensor, first_row: int = 0) -> None:
        """Forbid, in place, in the logits of consecutive sample rows from `first_row` on."""
        rows = self.mask_rows[first_row : first_row + len(logits)]
        if not (rows >= 0).any():
            return
        import torch

        from plait.platform.ops.token_mask import token_mask_

        width = 32 * self.mask.shape[1]
        token_mask_(logits[:, :width], torch.from_numpy(self.mask), torch.from_numpy(rows))
        if logits.shape[1] > width:  # a neighbour has more tokens
            logits[torch.from_numpy(rows >= 0), width:] = float("-inf")


class MaskJob:
    """Masks in the making."""

    def __init__(self, future: Future[StepMasks]) -> None:
        self._future = future

    def result(self) -> StepMasks:
        """Wait for the masks. Never raises for a matcher's sake; see `StepMasks.faults`."""
        return self._future.result()


class MaskFiller:
    """Fills masks on a helper thread, which starts with the first constrained step."""

    def __init__(self, clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._helper: ThreadPoolExecutor | None = None

    def start(self, entries: Sequence[MaskEntry], num_rows: int) -> MaskJob:
        """Begin to fill the masks of a step with `num_rows` sample rows."""
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        return MaskJob(self._helper.submit(fill_masks, entries, num_rows, self._clock))

    def close(self) -> None:
        """End the helper thread."""
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None


def fill_masks(
    entries: Sequence[MaskEntry], num_rows: int, clock: Clock = time.thread_time
) -> StepMasks:
    """The masks of a step, made here and now."""
    began = time.perf_counter()
    width = max((entry.matcher.vocabulary.num_words for entry in entries), default=0)
    num_masks = sum(1 + len(entry.drafts) for entry in entries)
    # Zeros: a narrower vocabulary does not have the tokens that another's adapter added.
    mask: Mask = np.zeros((num_masks, width), np.int32)
    mask_rows: Rows = np.full(num_rows, -1, np.int32)
    num_legal = [0] * len(entries)
    costs: list[float] = []
    faults: dict[int, PlaitError] = {}
    start = 0
    for number, entry in enumerate(entries):
        stop = start + 1 + len(entry.drafts)
        entry_began = clock()
        try:
            num_legal[number] = num = _fill_entry(entry, mask[start:stop])
        except Exception as error:  # noqa: BLE001 (whatever it is, it stays with its sequence)
            faults[number] = _internal(error)
        else:
            mask_rows[entry.first_row : entry.first_row + num + 1] = range(start, start + num + 1)
        costs.append(clock() - entry_began)
        start = stop
    return StepMasks(
        mask=mask,
        mask_rows=mask_rows,
        num_legal=tuple(num_legal),
        faults=faults,
        costs=tuple(costs),
        seconds=time.perf_counter() - began,
    )


def _internal(error: Exception) -> PlaitError:
    if isinstance(error, PlaitError):
        return error
    return InternalError(f"the grammar's matcher broke down: {error}")


def _fill_entry(entry: MaskEntry, rows: Mask) -> int:
    own = rows[:, : entry.matcher.vocabulary.num_words]
    return entry.matcher.fill_drafts(entry.drafts, own)
