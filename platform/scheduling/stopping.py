"""When a sequence ends: the rules, in their order. Plain Python, no tensors."""

from __future__ import annotations

from plait.platform.core import FinishReason, Sequence

Stop = tuple[FinishReason, int | str | None]


def check_stop(seq: Sequence, token_id: int, eos_token_ids: tuple[int, ...]) -> Stop | None:
    """Whether `seq` ends with `token_id`, which was just appended to `seq.tokens`.

    Called once for each output token, in order; feeds `seq.text`. Rules, first match counts:

    1. An end token (unless `ignore_eos`) or one of `stop_token_ids`, not within the first
       `min_tokens - 1` tokens: STOP; the reason is the id for `stop_token_ids`, None for an end
       token. The token's text is shown only with `include_stop_str_in_output`.
    2. A stop string in the text: STOP, the reason is the string (`OutputText` has the details).
    3. `max_total_tokens` reached: LENGTH.
    """
    params = seq.request.params
    text = seq.text
    if not params.min_tokens or seq.num_output_tokens >= params.min_tokens:
        is_eos = token_id in eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            if text is not None and params.include_stop_str_in_output:
                text.append(token_id)
            return FinishReason.STOP, None if is_eos else token_id
    stop = text.append(token_id) if text is not None else None
    if stop is not None:
        return FinishReason.STOP, stop
    if len(seq.tokens) >= seq.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
