"""The words that all of Plait shares, as data.

May enter: plain data that two or more parts exchange. May not enter: behaviour beyond
deriving one field from others, tensors, or any import of ours.

A request's life: `Request` (immutable, what the client asked) → one `Sequence` per answer
(mutable, owned by the scheduler) → `Span`s in a `StepPlan` → `SpanResult`s in a `StepResult`
→ `Event`s out of the engine, the last of which carries a `finish_reason`.
"""

from plait.platform.core.params import SamplingParams
from plait.platform.core.request import (
    AdapterUse,
    Array,
    CompiledGrammar,
    ImageItem,
    Request,
    Speculation,
)
from plait.platform.core.sequence import FinishReason, Sequence, SequenceState
from plait.platform.core.steps import Event, Span, SpanResult, StepPlan, StepResult, TokenLogprobs
from plait.platform.core.values import InvalidParameter

__all__ = [
    "AdapterUse",
    "Array",
    "CompiledGrammar",
    "Event",
    "FinishReason",
    "ImageItem",
    "InvalidParameter",
    "Request",
    "SamplingParams",
    "Sequence",
    "SequenceState",
    "Span",
    "SpanResult",
    "Speculation",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]
