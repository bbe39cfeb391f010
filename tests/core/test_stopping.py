"""The order of stop rules, and what a stop leaves in the text."""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny_tokenizers

from plait.platform.core import FinishReason, Request, SamplingParams, Sequence
from plait.platform.scheduling.stopping import check_stop
from plait.platform.text.output import OutputText

TOKENIZER = tiny_tokenizers.tokenizer("byte_level")
EOS = TOKENIZER.eos_token_ids[0]
PROMPT = (5, 6)


def run(words: list[str | int], max_total: int = 99, **params: Any) -> tuple[Any, str, int]:
    """Feed tokens until one stops; returns (finish, text, number of output tokens)."""
    request = Request(
        request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=90, **params)
    )
    seq = Sequence(
        seq_id=0, request=request, index=0, arrival=0, tokens=list(PROMPT),
        max_total_tokens=max_total, seed=0, text=OutputText(TOKENIZER, request.params, PROMPT),
    )  # fmt: skip
    for word in words:
        seq.tokens.append(word if isinstance(word, int) else token(word))
        finish = check_stop(seq, seq.tokens[-1], TOKENIZER.eos_token_ids)
        if finish is not None:
            return finish, seq.text.take(final=True), seq.num_output_tokens
    return None, seq.text.take(final=True), seq.num_output_tokens


def token(word: str) -> int:
    (token_id,) = TOKENIZER.encode(word, add_special_tokens=False)
    return token_id


CAT = token(" cat")


@pytest.mark.parametrize(
    ("words", "params", "expected"),
    [
        (["my", " cat", EOS], {}, ((FinishReason.STOP, None), "my cat", 3)),
        (["my", EOS, " cat"], {"ignore_eos": True}, (None, "my cat", 3)),
        (["my", EOS], {"skip_special_tokens": False}, ((FinishReason.STOP, None), "my", 2)),
        (
            ["my", EOS],
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            ((FinishReason.STOP, None), "my</s>", 2),
        ),
        (["my", " cat"], {"stop_token_ids": [CAT]}, ((FinishReason.STOP, CAT), "my", 2)),
        (
            ["my", " cat"],
            {"stop_token_ids": [CAT], "include_stop_str_in_output": True},
            ((FinishReason.STOP, CAT), "my cat", 2),
        ),
        # a token id stops before the text is looked at
        (["my", " cat"], {"stop_token_ids": [CAT], "stop": "cat"},
         ((FinishReason.STOP, CAT), "my", 2)),
        (["my", " cat"], {"stop": "y c"}, ((FinishReason.STOP, "y c"), "m", 2)),
        # an ignored end token may still be named as a stop token
        (["my", EOS], {"ignore_eos": True, "stop_token_ids": [EOS]},
         ((FinishReason.STOP, EOS), "my", 2)),
        (["my", EOS, EOS, " cat"], {"min_tokens": 3}, ((FinishReason.STOP, None), "my", 3)),
        # the first min_tokens tokens end no stop string
        (["my", " cat", " my"], {"min_tokens": 2, "stop": ["cat", "m"]},
         ((FinishReason.STOP, "m"), "my cat ", 3)),
    ],
)  # fmt: skip
def test_the_first_rule_that_holds_ends_the_sequence(
    words: list[str | int], params: dict[str, Any], expected: Any
) -> None:
    assert run(words, **params) == expected


def test_length_comes_last_and_holds_within_min_tokens() -> None:
    assert run(["my", " cat"], max_total=4) == ((FinishReason.LENGTH, None), "my cat", 2)
    assert run(["my", EOS], max_total=4) == ((FinishReason.STOP, None), "my", 2)
    assert run(["my", " cat"], max_total=4, stop="cat")[0] == (FinishReason.STOP, "cat")
    assert run(["my", " cat"], max_total=4, min_tokens=50)[0] == (FinishReason.LENGTH, None)


def test_without_text_only_ids_and_length_stop() -> None:
    request = Request(
        request_id="r", prompt_token_ids=PROMPT, params=SamplingParams(stop="x", max_tokens=3)
    )
    seq = Sequence(seq_id=0, request=request, index=0, arrival=0, tokens=[*PROMPT, 7],
                   max_total_tokens=4, seed=0)  # fmt: skip
    assert check_stop(seq, 7, (EOS,)) is None
    seq.tokens.append(8)
    assert check_stop(seq, 8, (EOS,)) == (FinishReason.LENGTH, None)
