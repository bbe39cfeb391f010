"""A plan turned into flat arrays: one line per token row, whatever its role.

Adapter, position and mask belong to rows. No array tells "prefill" from "decode".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from plait.platform.core import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Flat numpy arrays of one step: T rows, S spans, R sample rows, G KV groups."""

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    query_start: np.ndarray  # int32 [S+1]: rows of span s are query_start[s]:query_start[s+1]
    seq_lens: np.ndarray  # int32 [S]: KV length once this step's rows are written
    slot_mapping: tuple[np.ndarray, ...]  # G × int64 [T]: block * block_size + offset
    block_tables: tuple[np.ndarray, ...]  # G × int32 [S, max blocks]; 0 = null block
    sample_rows: np.ndarray  # int64 [R]: rows whose logits are needed, in span order
    sample_start: np.ndarray  # int32 [S+1]: sample rows of span s
    # Strands, empty where no request brings one.
    adapter_segments: tuple[tuple[int, int, str], ...] = ()  # (first row, end row, generation)
    image_rows: np.ndarray  # int64 [I]: rows whose embedding comes from an image
    num_drafts: np.ndarray  # int32 [S]
    mask_rows: np.ndarray  # int32 [R]: row of the grammar bitmask, -1 = unconstrained
