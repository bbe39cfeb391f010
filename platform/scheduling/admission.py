"""What the scheduler takes in: requests that can be served, and a seed for each answer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from plait.platform.errors import BadRequest, ContextLengthExceeded, Unsupported

if TYPE_CHECKING:
    from plait.platform.core import Request

_MASK_64 = (1 << 64) - 1
MAX_ADAPTERS = 8  # of one request: a row's cost is the sum of their ranks


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's answer `index`: the request's own for 0, else a mix of both.

    The mix is splitmix64 (Steele, Lea, Flood 2014): state `seed` advanced `index` times, then
    its output function, so seeds of neighbouring requests do not meet each other's answers.
    """
    if index == 0:
        return seed & _MASK_64
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def check_request(
    request: Request,
    max_total_tokens: int,
    *,
    max_model_len: int,
    slots_alone: int,
    takes_images: bool = False,
) -> None:
    """Refuse what can never be served, with the numbers.

    Args:
        request: what came in.
        max_total_tokens: prompt and output together.
        max_model_len: the context's length.
        slots_alone: tokens of the request whose KV fits when it is alone.
        takes_images: whether images are served.

    Raises:
        ContextLengthExceeded: too long for the context or for the KV blocks.
        BadRequest: it has no prompt, or adapters that cannot be combined.
        Unsupported: it has images, and none are served.
    """
    _check_adapters(request)
    num_prompt, limit = len(request.prompt_token_ids), max_model_len
    if request.images and not takes_images:
        raise Unsupported(
            "this engine takes no images: its model has no vision, or it was started with "
            "--encoder-cache-memory 0",
            param="messages",
        )
    if not num_prompt:
        raise BadRequest("the prompt is empty", param="prompt")
    wants_output = max_total_tokens > num_prompt
    if num_prompt + wants_output > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens and the context {limit}, "
            f"which must hold the prompt and the output: shorten the prompt",
            param="prompt",
        )
    if not num_prompt <= max_total_tokens <= limit:
        raise ContextLengthExceeded(
            f"prompt and output of {max_total_tokens} tokens do not fit the context: "
            f"the prompt has {num_prompt}, the context {limit}",
            param="max_tokens",
        )
    # The last token is never computed, unless it is the prompt's.
    slots = max(num_prompt, max_total_tokens - 1)
    if slots > slots_alone:
        raise ContextLengthExceeded(
            f"{num_prompt} prompt tokens and {max_total_tokens - num_prompt} of output need "
            f"KV slots for {slots} tokens, and at most {slots_alone} fit: "
            f"lower max_tokens or the prompt's length, or serve with more KV memory",
            param="max_tokens" if num_prompt <= slots_alone else "prompt",
        )


def _check_adapters(request: Request) -> None:
    uses = request.adapters
    if len(uses) > MAX_ADAPTERS:
        raise BadRequest(
            f"{len(uses)} adapters are more than a request may combine: at most {MAX_ADAPTERS}",
            param="adapters",
        )
    if len({use.generation for use in uses}) < len(uses):
        raise BadRequest(
            "an adapter is named twice: name it once, with the sum of the scales",
            param="adapters",
        )
    if not all(math.isfinite(use.scale) and use.scale for use in uses):
        raise BadRequest("an adapter's scale must be a number other than 0", param="adapters")
    if any(use.active_from < 0 for use in uses):
        raise BadRequest("an adapter is active from a position before the first", param="adapters")
    if not 0 < request.share < math.inf:
        raise BadRequest("a tenant's share must be a number above 0", param="share")
