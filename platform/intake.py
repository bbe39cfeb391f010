"""From what a client asked to a `Request` for the engine: all that can fail is checked here.

Whatever is refused here costs the engine nothing. Nothing is truncated: a prompt that does not
fit is an error with the numbers in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from plait.adapters.composition import uses
from plait.platform.core import CompiledGrammar, Request, SamplingParams, Speculation
from plait.platform.errors import BadRequest, ContextLengthExceeded, Unsupported
from plait.vision.placing import NO_IMAGES, PlacedImages

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo
    from plait.platform.config import EngineConfig
    from plait.platform.text.tokenizer import Tokenizer

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_TOKEN_LIST = 1024  # logit_bias, stop_token_ids, bad words' tokens
MAX_STOP_LENGTH = 1024  # characters of one stop string or bad word


class Intake:
    """Builds checked requests for one served model.

    `tokenizer` may be None where prompts are token ids and no option needs text.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = config.model.vocab_size
        self._max_model_len = config.scheduler.max_model_len
        self._eos = config.model.eos_token_ids
        self._vision = config.model.vision

    def request(  # noqa: PLR0913 (what a request is made of)
        self,
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        adapters: Sequence[tuple[AdapterInfo, float]] = (),
        tenant: str = "",
        share: float = 1.0,
        tokenizer: Tokenizer | None = None,
        grammar: CompiledGrammar | None = None,
        speculation: Speculation | None = None,
        images: PlacedImages | None = None,
    ) -> Request:
        """A request ready for `Engine.add`.

        `max_tokens=None` becomes what the context leaves. `adapters` are those that `compose`
        kept, with their scales, and `tokenizer` is what these make of the model's. Raises
        `BadRequest` naming the field, `ContextLengthExceeded` with the numbers.
        """
        prompt = tuple(prompt_token_ids)
        if not prompt:
            raise BadRequest("the prompt is empty: give at least one token of text", param="prompt")
        used = tuple(uses(adapters, prompt))
        widened = max((info.vocab_size or 0 for info, _ in used), default=0)
        vocab_size = max(self._vocab_size, widened)
        placed = images or NO_IMAGES
        _check_ids("prompt", self._check_images(prompt, placed), vocab_size)
        params = self._fit_length(len(prompt), placed, self._with_ends(params, tokenizer))
        self._check_params(params, vocab_size)
        if grammar is not None:
            self._check_constrained(params)
        if not isinstance(speculation, Speculation | None):
            raise BadRequest(
                "speculation is a Speculation, such as Speculation(enabled=False), or None",
                param="speculation",
            )
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            adapters=tuple(use for _, use in used),
            vocab_size=vocab_size if vocab_size > self._vocab_size else None,
            tenant=tenant,
            share=share,
            grammar=grammar,
            speculation=speculation or Speculation(),
            images=placed.items,
            positions=placed.positions,
            position_delta=placed.position_delta,
            spans=placed.spans,
            vision_digest=placed.vision_digest,
            bad_word_token_ids=self._bad_words(params, tokenizer or self._tokenizer),
        )

    def _check_images(self, prompt: tuple[int, ...], placed: PlacedImages) -> Sequence[int]:
        """The tokens that are text. Image tokens stand where images are, and nowhere else."""
        vision = self._vision
        if vision is None:
            if placed.items:
                raise Unsupported("this model takes no images", param="messages")
            return prompt
        token = vision.image_token_id
        num_found = prompt.count(token)
        if num_found != placed.num_tokens:
            raise BadRequest(
                f"the prompt has {num_found} times the token {token}, which stands for images, "
                f"and its images take {placed.num_tokens}: images come as parts of a chat",
                param="prompt",
            )
        # It may lie outside of the vocabulary.
        return prompt if token < self._vocab_size else [i for i in prompt if i != token]

    def _fit_length(
        self, num_prompt: int, placed: PlacedImages, params: SamplingParams
    ) -> SamplingParams:
        limit, wanted = self._max_model_len, params.max_tokens
        room = limit - num_prompt
        if room < 0 or (room == 0 and wanted != 0):
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens{_of_images(placed)}, but the context holds "
                f"{limit} tokens in all, answer included: shorten the prompt"
                + (f" to at most {limit - 1} tokens" if wanted != 0 else ""),
                param="prompt",
            )
        if wanted is not None and wanted > room:
            raise ContextLengthExceeded(
                f"the prompt has {num_prompt} tokens{_of_images(placed)} and max_tokens is "
                f"{wanted}: together "
                f"{num_prompt + wanted}, but the context holds {limit} tokens. Ask for at most "
                f"{room} tokens, or shorten the prompt",
                param="max_tokens",
            )
        if wanted is None:
            if params.min_tokens > room:
                raise ContextLengthExceeded(
                    f"min_tokens is {params.min_tokens}, but after the prompt of {num_prompt} "
                    f"tokens the context of {limit} leaves room for {room}",
                    param="min_tokens",
                )
            params = dataclasses.replace(params, max_tokens=room)
        return params

    def _check_params(self, params: SamplingParams, vocab_size: int) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > MAX_LOGPROBS:
                raise BadRequest(f"{name} is {count}; at most {MAX_LOGPROBS}", param=name)
        if len(params.stop) > MAX_STOP_STRINGS:
            raise BadRequest(
                f"{len(params.stop)} stop strings; at most {MAX_STOP_STRINGS}", param="stop"
            )
        for name, values in (("stop", params.stop), ("bad_words", params.bad_words)):
            if any(len(text) > MAX_STOP_LENGTH for text in values):
                raise BadRequest(
                    f"{name}: a string is longer than {MAX_STOP_LENGTH} characters", param=name
                )
        if params.stop and self._tokenizer is None:
            raise BadRequest("stop strings need a tokenizer; use stop_token_ids", param="stop")
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
            ("bad_words", params.bad_words),
        ):
            if len(ids) > MAX_TOKEN_LIST:
                raise BadRequest(
                    f"{name} has {len(ids)} entries; at most {MAX_TOKEN_LIST}", param=name
                )
        if len(params.allowed_token_ids or ()) > vocab_size:
            raise BadRequest(
                f"allowed_token_ids has more entries than the vocabulary of {vocab_size}",
                param="allowed_token_ids",
            )
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("logit_bias", tuple(params.logit_bias), vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        self._check_min_tokens(params)

    def _check_constrained(self, params: SamplingParams) -> None:
        """A constrained answer ends where its grammar says, by the model's end token."""
        if params.ignore_eos:
            raise BadRequest(
                "ignore_eos has no meaning where the form of the answer is constrained, as that "
                "says when it ends; leave it out",
                param="ignore_eos",
            )
        if not self._eos:
            raise Unsupported(
                "this model has no end token, so an answer whose form is constrained could not end",
                param="response_format",
            )

    def _check_min_tokens(self, params: SamplingParams) -> None:
        """An answer must be able to reach `min_tokens` without an end token."""
        allowed = params.allowed_token_ids
        if allowed is None or params.min_tokens == 0:
            return
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        if set(allowed) <= ends:
            raise BadRequest(
                "min_tokens bans end tokens, and allowed_token_ids allows nothing else",
                param="allowed_token_ids",
            )

    def _with_ends(self, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
        """An adapter's own end token ends answers as well."""
        if tokenizer is None or tokenizer is self._tokenizer or params.ignore_eos:
            return params
        model = () if self._tokenizer is None else self._tokenizer.eos_token_ids
        known = {*self._eos, *model, *params.stop_token_ids}
        ends = tuple(i for i in tokenizer.eos_token_ids if i not in known)
        return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *ends))

    def _bad_words(
        self, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if tokenizer is None:
            raise BadRequest("bad_words need a tokenizer", param="bad_words")
        return tokenizer.bad_word_ids(params.bad_words)


def _of_images(placed: PlacedImages) -> str:
    if not placed.items:
        return ""
    sizes = [item.num_embeds for item in placed.items]
    most = max(sizes)
    which = f"; image {sizes.index(most) + 1} takes the most, {most:,}" if len(sizes) > 1 else ""
    return f" ({placed.num_tokens:,} of them for images{which})"


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise BadRequest(
            f"{name}: token id {wrong} is outside the vocabulary of {vocab_size}", param=name
        )
