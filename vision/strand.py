"""The part of images in a step: what a chunk touches is encoded in the step that computes it.

A chunk ends before an image that has no room now: in the bytes of the cache, which others hold, or
in the rows that one step encodes. An image is held from the plan that first computes some of its
tokens until all are computed; nothing is held for what lies further ahead.

Why nobody waits for ever: between steps only a sequence that is inside an image holds one, and it
can go on without another. Once nobody is inside one, all bytes can be had, and `check` made sure
that each image fits; and the first to be encoded in a step may be of any size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.platform.core import Request, Sequence, StepPlan
from plait.platform.errors import BadRequest, ImageTooLarge
from plait.platform.image_rows import image_runs, touched
from plait.platform.strand import Strand
from plait.vision.encoder_cache import EncoderCache, Reservation, encoder_key

if TYPE_CHECKING:
    import torch

    from plait.platform.config import VisionInfo
    from plait.platform.core import ImageItem
    from plait.platform.executor import Executor

MAX_STEP_ROWS = 1024  # embeddings that one step makes, of more than one image
_COUNTED = ("encoded_images", "encoded_rows", "encoder_hits", "encoder_misses", "image_rows")


@dataclass(slots=True, eq=False)
class _Held:
    """One image of a sequence that is inside it, or begins it in this step."""

    item: ImageItem
    reservation: Reservation
    is_used: bool = False  # a step has taken rows of it


@dataclass(frozen=True, slots=True)
class _Unit:
    """Images that one step begins together: one, or all within one of `Request.spans`."""

    start: int
    items: tuple[ImageItem, ...]


class VisionStrand(Strand):
    """Implements `platform.strand.Strand`."""

    takes_images = True

    def __init__(
        self, executor: Executor, vision: VisionInfo, cache: EncoderCache, *, bytes_per_row: int,
        max_step_rows: int = MAX_STEP_ROWS,
    ) -> None:  # fmt: skip
        """`bytes_per_row`: of one embedding with all its levels, as `executor` makes it."""
        self._executor = executor
        self._vision = vision
        self._cache = cache
        self._bytes_per_row = bytes_per_row
        self._max_step_rows = max_step_rows
        self._held: dict[int, tuple[Sequence, dict[int, _Held]]] = {}  # by start in the prompt
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._seconds = 0.0

    # --- whether a sequence may run ---

    def check(self, request: Request) -> None:
        """See `Strand.check`. Raises `ImageTooLarge`, or `BadRequest` where parts contradict."""
        _check_places(request, self._vision)
        for unit in _units(request, 0, len(request.prompt_token_ids)):
            rows = sum(item.num_embeds for item in unit.items)
            needed, capacity = rows * self._bytes_per_row, self._cache.capacity
            if needed > capacity:
                what = "an image takes" if len(unit.items) == 1 else "images that belong together"
                raise ImageTooLarge(
                    f"{what} {rows:,} embeddings of {self._bytes_per_row:,} bytes, {needed:,} in "
                    f"all, and embeddings have {capacity:,}: send it smaller, or serve with "
                    f"--encoder-cache-memory {needed} or more",
                    param="messages",
                )

    def begin(self, now_s: float) -> None:
        """See `Strand.begin`: what is consumed, or was planned and not begun, is let go."""
        del now_s
        for seq_id, (sequence, helds) in list(self._held.items()):
            computed = sequence.num_computed_tokens
            for start, held in list(helds.items()):
                is_inside = start < computed < start + held.item.num_tokens
                if not is_inside or held.reservation.entry.rows is None:
                    held.reservation.release()
                    del helds[start]
            if not helds:
                del self._held[seq_id]

    def admit(self, sequence: Sequence) -> bool:
        """See `Strand.admit`: nothing is reserved before the step that needs it."""
        del sequence
        return True

    def release(self, sequence: Sequence) -> None:
        """See `Strand.release`."""
        _, helds = self._held.pop(sequence.seq_id, (sequence, {}))
        for held in helds.values():
            held.reservation.release()

    @property
    def busy(self) -> bool:
        """See `Strand.busy`: whoever waits for an image waits for those that run."""
        return False

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """See `Strand.check_integrity`."""
        assert self._held.keys() <= {s.seq_id for s in running}, "held by who does not run"
        helds = [held for _, of_one in self._held.values() for held in of_one.values()]
        self._cache.check_integrity(held.reservation for held in helds)

    # --- a step ---

    def fit(self, sequence: Sequence, num_tokens: int) -> int:
        """See `Strand.fit`: up to the first image that cannot be had in this step."""
        request, start = sequence.request, sequence.num_computed_tokens
        if not request.images or start >= sequence.num_prompt_tokens:
            return num_tokens
        for unit in _units(request, start, start + num_tokens):
            if not self._hold(sequence, unit):
                return max(0, unit.start - start)
        return num_tokens

    def _hold(self, sequence: Sequence, unit: _Unit) -> bool:
        """Hold all images of a unit, or none more than before."""
        _, helds = self._held.setdefault(sequence.seq_id, (sequence, {}))
        keys = {item.start: encoder_key(sequence.request, item) for item in unit.items}
        wanted = [item for item in unit.items if item.start not in helds]
        absent = {keys[i.start]: i.num_embeds for i in wanted if keys[i.start] not in self._cache}
        others = self._cache.num_computing_rows
        if absent and others and others + sum(absent.values()) > self._max_step_rows:
            return False
        taken: list[_Held] = []
        # What is there first, lest it is evicted for what is not.
        for item in sorted(wanted, key=lambda item: keys[item.start] in absent):
            reservation = self._cache.try_reserve(
                keys[item.start], item.num_embeds, item.num_embeds * self._bytes_per_row
            )
            if reservation is None:
                for held in taken:
                    held.reservation.release()
                return False
            taken.append(_Held(item, reservation))
        helds.update((held.item.start, held) for held in taken)
        return True

    def embeds(self, plan: StepPlan) -> torch.Tensor | None:
        """See `Strand.embeds`: encodes what is not there, all together."""
        parts: list[torch.Tensor] = []
        if not any(span.sequence.request.images for span in plan.spans):
            return None
        self._encode(plan)
        for span in plan.spans:
            helds = self._held.get(span.sequence.seq_id, (span.sequence, {}))[1]
            for run in image_runs(span.sequence.request, span.start, span.start + span.num_tokens):
                rows = helds[run.item.start].reservation.entry.rows
                assert rows is not None
                parts.append(rows[run.first_embed : run.first_embed + run.length])
        if not parts:
            return None
        self._counts["image_rows"] += sum(map(len, parts))
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _encode(self, plan: StepPlan) -> None:
        missing: dict[bytes, tuple[Request, _Held]] = {}
        for span in plan.spans:
            request = span.sequence.request
            for item in touched(request, span.start, span.start + span.num_tokens):
                held = self._held[span.sequence.seq_id][1][item.start]
                entry = held.reservation.entry
                is_missing = entry.rows is None and entry.key not in missing
                if is_missing:
                    missing[entry.key] = (request, held)
                if not held.is_used:
                    held.is_used = True
                    self._counts["encoder_misses" if is_missing else "encoder_hits"] += 1
        if not missing:
            return
        began = time.perf_counter()
        works = list(missing.values())
        uses = [tuple(u for u in request.adapters if u.tower_digest) for request, _ in works]
        encoded = self._executor.encode([held.item for _, held in works], uses if any(uses) else ())
        for (_, held), rows in zip(works, encoded, strict=True):
            held.reservation.commit(rows)
            self._counts["encoded_images"] += 1
            self._counts["encoded_rows"] += len(rows)
        self._seconds += time.perf_counter() - began

    # --- figures ---

    @property
    def figures(self) -> dict[str, Any]:
        """See `Strand.figures`."""
        return {
            **self._counts,
            "encoder_seconds": self._seconds,
            "encoder_bytes": self._cache.num_bytes,
            "encoder_evictions": self._cache.num_evictions,
        }


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(parts)


def _units(request: Request, start: int, stop: int) -> Iterator[_Unit]:
    """What begins in, or reaches into, positions start … stop - 1."""
    items = list(touched(request, start, stop))
    while items:
        first = items[0]
        around = next(
            ((a, b) for a, b in request.spans if a <= first.start and first.start < b), None
        )
        if around is None or around[1] <= first.start + first.num_tokens:
            # Spans within one image change nothing: it is one unit anyway.
            begin = first.start if around is None else min(first.start, around[0])
            yield _Unit(begin, (first,))
            items = items[1:]
            continue
        inside = [item for item in request.images if around[0] <= item.start < around[1]]
        inside = [item for item in inside if item.start + item.num_tokens > start]
        yield _Unit(around[0], tuple(inside))
        items = [item for item in items if item.start >= around[1]]


def _check_places(request: Request, vision: VisionInfo) -> None:
    """Refuse a prompt whose images are not where its tokens say."""
    tokens = request.prompt_token_ids
    num_tokens, end, count = len(tokens), 0, 0
    for item in request.images:
        inner = 0
        for offset, length in item.embedded:
            at = item.start + offset
            ids = tokens[at : at + length]
            if offset < inner or length < 1 or set(ids) != {vision.image_token_id}:
                raise _misplaced(request)
            inner = offset + length
        if item.start < end or inner > item.num_tokens or not inner:
            raise _misplaced(request)
        end = item.start + item.num_tokens
        count += item.num_embeds
    if end > num_tokens or count != tokens.count(vision.image_token_id):
        raise _misplaced(request)
    known = 12 * num_tokens if vision.has_grid_positions and request.images else 0
    if len(request.positions) != known:
        raise _misplaced(request)
    end = 0
    for begin, stop in request.spans:
        if not end <= begin < stop <= num_tokens:
            raise _misplaced(request)
        end = stop
    if request.images and bool(vision.bidirectional) != bool(request.spans):
        raise _misplaced(request)


def _misplaced(request: Request) -> BadRequest:
    return BadRequest(
        f"the prompt's {len(request.images)} images are not where its image tokens stand: text "
        "must not hold image tokens",
        param="messages",
    )
