"""The words that all of Plait shares, as data.

May enter: plain data that two or more parts exchange. May not enter: behaviour beyond
deriving one field from others, tensors, or any import of ours.

A request's life: `Request` (immutable, what the client asked) → one `Sequence` per answer
(mutable, owned by the scheduler) → `Span`s in a `StepPlan` → `RowResult`s in a `StepResult`
→ `Event`s out of the engine, the last of which carries a `finish_reason`. What every step makes
anew is a `msgspec.Struct`: one is made in a tenth of a frozen dataclass's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

import msgspec


class InvalidParameter(ValueError):
    """A parameter has a value that cannot be served; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted sequence ends with exactly one of these."""

    STOP = "stop"  # end token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the client went away, or the server shut down
    ERROR = "error"  # `Event.error` says what happened


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are chosen, and when to stop. Field names are vLLM's.

    Raises `InvalidParameter` for a value outside its range. Values that depend on the model
    (token ids against the vocabulary, length against the context) are checked at admission.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: SequenceOf[str] = ()
    seed: int | None = None  # None: random, drawn once at admission
    stop: SequenceOf[str] | str = ()
    stop_token_ids: SequenceOf[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many top alternatives; 0: only the chosen token's
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, convert in _CONVERT.items():
            object.__setattr__(self, name, convert(name, getattr(self, name)))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_sampling(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _integer(name: str, value: Any) -> int:
    """As a plain int; numpy's integers are welcome, booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidParameter(name, f"{name} takes integers, got {value!r}")
    return int(value)


def _integer_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidParameter(name, f"{name} must be a number, got {value!r}")
    return float(value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(name, f"{name} must be true or false, got {value!r}")
    return value


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes):
        raise InvalidParameter(name, f"{name} takes a list, got {value!r}")
    return tuple(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _listed(name, value)
    if any(not isinstance(text, str) or not text for text in texts):
        raise InvalidParameter(name, f"{name} takes non-empty strings, got {value!r}")
    return texts


def _integers(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_integer(name, token) for token in _listed(name, value))


def _allowed(name: str, value: Any) -> tuple[int, ...] | None:
    tokens = None if value is None else _integers(name, value)
    if tokens == ():
        raise InvalidParameter(name, f"{name} must not be empty")
    return tokens


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value or {}, Mapping):
        raise InvalidParameter(name, f"{name} maps token ids to numbers, got {value!r}")
    biases = {_integer(name, t): _number(name, b) for t, b in (value or {}).items()}
    if not all(-100 <= bias <= 100 for bias in biases.values()):
        raise InvalidParameter(name, f"{name} maps token ids to [-100, 100]")
    return biases


_CONVERT: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("n", "min_tokens", "top_k"), _integer),
    **dict.fromkeys(("max_tokens", "logprobs", "prompt_logprobs", "seed"), _integer_or_none),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _number),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), _switch),
    "spaces_between_special_tokens": _switch,
    "stop": _strings,
    "bad_words": _strings,
    "stop_token_ids": _integers,
    "allowed_token_ids": _allowed,
    "logit_bias": _biases,
}
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 16),
    "min_tokens": (0, math.inf),
    "max_tokens": (0, math.inf),
    "logprobs": (0, math.inf),
    "prompt_logprobs": (0, math.inf),
    "temperature": (0, 100),
    "top_p": (0, 1),  # 0 itself is refused below
    "min_p": (0, 1),
    "top_k": (0, math.inf),
    "repetition_penalty": (0, 100),  # 0 itself is refused below
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def _check_sampling(p: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(p, name)
        if value is not None and not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
            raise InvalidParameter(name, f"{name} must be {bounds}, got {value!r}")
    for name in ("top_p", "repetition_penalty"):
        if getattr(p, name) == 0:
            raise InvalidParameter(name, f"{name} must be greater than 0")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidParameter("min_tokens", f"min_tokens {p.min_tokens} > max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """One adapter of a request. Resolved once, at intake: names may move on, this does not."""

    generation: str  # SHA-256 (hex) of the adapter's content
    scale: float = 1.0  # the client's, beside the adapter's own; never 0
    active_from: int = 0  # first position it changes; above 0 where it awaits an invocation
    kv_digest: str = ""  # SHA-256 of what can change a cached K or V; empty: nothing can
    tower_digest: str = ""  # SHA-256 of what changes an image's embeddings; empty: nothing does
    draft: str = ""  # generation of the draft model's adapter that goes with it, if one does


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGrammar:
    """A grammar ready for matchers, for one vocabulary."""

    key: str  # SHA-256 (hex) over backend, its version, vocabulary, canonical grammar, options
    backend: str  # "xgrammar" | "llguidance"
    payload: bytes  # what the backend makes a matcher from
    num_bytes: int  # that a matcher's grammar takes in memory, about
    vocabulary: str = ""  # digest of the vocabulary that it was compiled for
    notes: tuple[str, ...] = ()  # for the client, such as of a tool without its schema
    # What that has beyond the model's own: (id, bytes, whether it is special).
    added_tokens: tuple[tuple[int, bytes, bool], ...] = ()
    checks: bytes = b""  # what a grammar cannot hold, kept beside it; see structured/unique.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """A dense array in bytes, row by row: how one crosses between processes."""

    dtype: str  # numpy's name
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageItem:
    """One image of a prompt, made ready for the encoder.

    `key` is a SHA-256 (hex) over all that its embeddings depend on, bar adapters: the content,
    the processor's settings, the model's revision.
    """

    key: str
    start: int  # position in the prompt where its range begins
    num_tokens: int  # of the range; row breaks and tile markers are ordinary tokens inside
    embedded: tuple[tuple[int, int], ...]  # runs (offset in the range, length) of embedding rows
    tensors: Mapping[str, Array]  # this image's own part of what the processor made

    @property
    def num_embeds(self) -> int:
        """Rows that the encoder makes of it."""
        return sum(length for _, length in self.embedded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a request says of drafts. They change how fast its tokens come, and nothing else.

    Where drafts are verified by rejection, a text has the same distribution rather than the same
    tokens.
    """

    enabled: bool = True
    max_tokens: int | None = None  # most drafts in one step; None: the server's bound

    def __post_init__(self) -> None:
        object.__setattr__(self, "enabled", _switch("speculation.enabled", self.enabled))
        name = "speculation.max_tokens"
        most = _integer_or_none(name, self.max_tokens)
        if most is not None and most < 0:
            raise InvalidParameter(name, f"{name} must be at least 0, got {most}")
        object.__setattr__(self, "max_tokens", most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked, tokenized and checked. Immutable."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # on the engine's monotonic clock
    cache_salt: str = ""  # blocks are shared only under the same salt
    adapters: tuple[AdapterUse, ...] = ()  # their changes add up; empty: the base model
    vocab_size: int | None = None  # where adapters add tokens to the model's own
    tenant: str = ""  # who shares a fair share; the digest of a key, never the key
    share: float = 1.0  # the tenant's weight against others
    images: tuple[ImageItem, ...] = ()  # in the order of the prompt
    # int32 [3, P]: time, height and width of each prompt token, where images give it such.
    positions: bytes = b""
    position_delta: int = 0  # from a later token's index to its position, in all three rows
    # [start, end) of prompt tokens that see each other whole, and are computed in one step.
    spans: tuple[tuple[int, int], ...] = ()
    vision_digest: str = ""  # of the whole span, where it holds more than one image; in block keys
    grammar: CompiledGrammar | None = None  # what the answer must obey
    speculation: Speculation = Speculation()
    # Token sequences of `params.bad_words` (with and without a leading space).
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()


class SequenceState(StrEnum):
    """Where a sequence stands; only the scheduler changes it."""

    WAITING = "waiting"  # no place in the running set; may still hold blocks (parked)
    FORKING = "forking"  # waits for its leader's prompt to be computed
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Sequence:
    """One growing list of tokens. Owned by the scheduler; others read it within a step.

    Invariant: `num_computed_tokens` <= len(tokens); `tokens[num_computed_tokens:]` is what the
    next spans must compute. `drafts` are unverified and never part of `tokens`.
    """

    seq_id: int
    request: Request
    index: int  # which of the request's `n` answers
    arrival: int  # admission order, for fairness
    tokens: list[int]  # prompt, then output
    max_total_tokens: int  # prompt + max_tokens, cut at the context's end
    seed: int  # 64 bit; never None
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # drafts that steps verified for it
    num_accepted_tokens: int = 0  # of these, how many its output has
    block_ids: list[list[int]] = field(default_factory=list)  # per KV group; 0 = null block
    drafts: list[int] = field(default_factory=list)
    # Set with `drafts`: what each was drawn from, where rejection is to verify them; else empty.
    draft_probs: list[Any] = field(default_factory=list)
    # Source → [verified, accepted]; kept by whoever drafts. They add up to the two numbers above.
    draft_counts: dict[str, list[int]] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it
    failure: tuple[str, str] | None = None  # (error code, message) where it ended with ERROR
    text: Any = None  # its `OutputText`, owned by the engine; None where nobody reads text
    added_s: float = 0.0  # when the engine took it, on the engine's clock
    started_s: float | None = None  # when its first step began
    epoch: int = 0  # grows with every preemption; results of an older epoch are dropped
    num_prompt_tokens: int = field(init=False)  # that the client gave; asked for all the time

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens accepted so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were accepted so far."""
        return len(self.tokens) - self.num_prompt_tokens


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A run of consecutive tokens of one sequence that one step computes.

    Tokens are `(sequence.tokens + drafts)[start : start + num_tokens]`. Logits are needed for
    the last `num_samples` rows of the span (0 while the prompt is still incomplete, else
    1 + number of drafts), and for every prompt row where `prompt_logprobs` is wanted.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int
    drafts: tuple[int, ...] = ()
    block_ids: tuple[tuple[int, ...], ...] = ()  # per KV group, snapshot covering the span
    wants_prompt_logprobs: bool = False


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler chose for one step. Plain data, no tensors."""

    step_id: int
    spans: tuple[Span, ...]
    images: tuple[Any, ...] = ()  # image items to encode first
    finished: tuple[Sequence, ...] = ()  # ended while planning (deadline, impossible)
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows that the step computes."""
        return sum(span.num_tokens for span in self.spans)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The chosen token's natural-log probability and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()


class SpanResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one span produced: accepted tokens (drafts that held, then one new token).

    `error` set: this sequence alone must end (NaN logits, say); its tokens are ignored.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for prompt tokens start+1 … of this span
    error: str | None = None
    error_code: str = "internal_error"


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order of `StepPlan.spans`."""

    spans: tuple[SpanResult, ...]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one sequence; the last one carries `finish_reason`.

    `text` is the delta that may be shown now (stop strings held back, characters whole); the
    deltas of a sequence concatenate to its full text. `error` is `(code, message)`.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # once, when the prompt is done
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0  # verified so far
    num_accepted_tokens: int = 0  # of these, how many are among the output
    draft_counts: tuple[tuple[str, int, int], ...] = ()  # (source, verified, accepted), by name
    queued_s: float = 0.0  # seconds from `Engine.add` to its first step
    num_preemptions: int = 0
    error: tuple[str, str] | None = None
