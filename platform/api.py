"""The public face, re-exported as `plait`: the offline `LLM`, its outputs, parameters, errors."""

from __future__ import annotations

from plait.adapters.info import AdapterInfo, LoadReport
from plait.platform.core import (
    FinishReason,
    InvalidParameter,
    SamplingParams,
    Speculation,
    TokenLogprobs,
)
from plait.platform.errors import (
    AdapterError,
    AdapterNotFound,
    BadRequest,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    ModelUnsupported,
    Overloaded,
    PlaitError,
    Unsupported,
)
from plait.platform.offline.llm import LLM
from plait.platform.offline.outputs import CompletionDelta, CompletionOutput, RequestOutput
from plait.structured.params import StructuredOutputs
from plait.structured.tools.parser import ToolCall

__all__ = [
    "LLM",
    "AdapterError",
    "AdapterInfo",
    "AdapterNotFound",
    "BadRequest",
    "CompletionDelta",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "FinishReason",
    "InvalidParameter",
    "LoadReport",
    "ModelUnsupported",
    "Overloaded",
    "PlaitError",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "StructuredOutputs",
    "TokenLogprobs",
    "ToolCall",
    "Unsupported",
]
