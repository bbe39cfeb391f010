"""One answer as it grows: `Sequence`, where it stands, and why it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plait.platform.core.request import Request


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted sequence ends with exactly one of these."""

    STOP = "stop"  # end token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the client went away, or the server shut down
    ERROR = "error"  # `Event.error` says what happened


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
