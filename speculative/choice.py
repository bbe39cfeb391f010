"""How the drafts of a model are chosen: what the engine lends to a draft model or a head.

May enter: what the target's own choice needs to know of a sequence. May not enter: a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from plait.platform.core import Sequence

if TYPE_CHECKING:
    from plait.speculative.rejection import Distribution

Floats = npt.NDArray[np.float32]

MAX_LOGIT_ROWS = 64  # made at a time: bounds the memory of logits
MIN_TEMPERATURE = 1e-4

# Forbids, in place, what the grammar of a sequence forbids after it and some drafts. False: these
# drafts have ended its answer, or nobody knows what may follow them.
Mask = Callable[[Sequence, tuple[int, ...], Floats], bool]


class Choose(Protocol):
    """What the target would choose after a sequence and drafts; None where it cannot."""

    def __call__(
        self, sequence: Sequence, drafts: tuple[int, ...], logits: Floats, /, *, masked: bool
    ) -> int | None:
        """`logits` has the width of the sequence's vocabulary, and may be changed."""


class Draw(Protocol):
    """A draft behind a sequence and drafts, and what it was drawn from; None where none can be."""

    def __call__(
        self, sequence: Sequence, drafts: tuple[int, ...], logits: Floats, /
    ) -> tuple[int, Distribution] | None:
        """`logits` has the width of the sequence's vocabulary, and may be changed."""


def ends(sequence: Sequence, token: int, eos_token_ids: tuple[int, ...]) -> bool:
    """Whether an answer ends with a token, as a rule: nothing is drafted behind it."""
    params = sequence.request.params
    is_eos = token in eos_token_ids and not params.ignore_eos
    return is_eos or token in params.stop_token_ids
