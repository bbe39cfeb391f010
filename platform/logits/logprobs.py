"""Log-probabilities under the model's own distribution.

They are those of the raw logits, before temperature, penalties, bias and filters (vLLM's
default, "raw_logprobs"), so that they do not depend on how the token was chosen.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from plait.platform.core import TokenLogprobs
from plait.platform.logits.token_filters import largest


def token_logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of `token_id`, and the `num_top` most likely tokens.

    `logits`: [V] fp32, no NaN, the largest finite. Of equal tokens the lower id ranks first.
    """
    peak = logits.max()
    total = float(peak) + math.log(np.exp(logits - peak).sum(dtype=np.float64))
    value = logits[token_id]
    rank = 1 + np.count_nonzero(logits > value) + np.count_nonzero(logits[:token_id] == value)
    top = largest(logits, min(num_top, len(logits))) if num_top else ()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(value) - total,
        rank=int(rank),
        top=tuple((int(i), float(logits[i]) - total) for i in top),
    )
