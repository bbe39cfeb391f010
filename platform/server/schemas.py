"""The bodies that clients send, as pydantic models. Types here; ranges in `SamplingParams`.

Names are OpenAI's and vLLM's. A field stands here only if it is honoured, or if a part of its
values is and the rest is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Int = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Scalar = str | int | float | bool | None
T = TypeVar("T")
# Ends at the first bad entry: pydantic would keep an error for each of millions.
List = Annotated[list[T], Field(fail_fast=True)]


class Schema(BaseModel):
    """Strict types, finite numbers; unknown fields are told apart before this."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class StreamOptions(Schema):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # accepted, without effect: chunks are never padded


class ChatMessage(BaseModel):
    """One message. Further keys are checked by prompts.py."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | List[dict[str, Any]] | None = None


class AdapterRef(Schema):
    """An adapter by its name, or by its very content, and how strongly it is to act."""

    name: str | None = None
    generation: str | None = None
    scale: float = 1.0


class LoraRef(Schema):
    """llama.cpp's form of `AdapterRef`; ids are names here."""

    id: str
    scale: float = 1.0


class AdapterChoice(Schema):
    """Which model, and which adapters on it. Further names are those of other servers."""

    model: str | None = None  # the base, an adapter, or base:adapter
    adapter: str | AdapterRef | None = None
    adapter_id: str | None = None
    lora_path: str | None = None  # a loaded adapter's name, never a path
    adapters: List[str | AdapterRef] | None = None
    lora: List[LoraRef] | None = None


class Constraint(Schema):
    """What the answer must obey, one of these. Their insides: `plait.structured.requests`."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Any = None  # without effect: each grammar gets the one that is exact
    json_schema: dict[str, Any] | bool | str | None = None  # SGLang's and llama.cpp's
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class SpeculationWish(Schema):
    """Whether and how far to draft ahead. Ranges: `core.Speculation`."""

    enabled: bool = True
    max_tokens: Int | None = None


class GenerationRequest(AdapterChoice, Constraint):
    """What chat and completion requests have in common."""

    n: Int = 1
    best_of: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int = 0
    temperature: float = 1.0  # as OpenAI's; a checkpoint's generation config is not looked at
    top_p: float = 1.0
    top_k: Int = 0
    min_p: float = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    allowed_token_ids: List[TokenId] | None = None
    bad_words: List[str] = []
    stop: str | List[str] = []
    stop_token_ids: List[TokenId] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    truncate_prompt_tokens: Int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: Int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    use_beam_search: bool = False
    speculation: SpeculationWish | None = None


class ChatTemplating(Schema):
    """How messages become a prompt."""

    messages: List[ChatMessage]
    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates bring their own
    chat_template_kwargs: dict[str, Scalar] = {}
    reasoning_effort: str | None = None  # for templates that read it
    tools: List[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class ChatCompletionRequest(ChatTemplating, GenerationRequest):
    """Body of /v1/chat/completions."""

    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: str | List[TokenId] | List[str] | List[List[TokenId]]
    suffix: str | None = None
    logprobs: Int | None = None
    add_special_tokens: bool = True


class TokenizeRequest(AdapterChoice):
    """Body of /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: List[ChatMessage] | None = None
    add_special_tokens: bool | None = None  # default: for a prompt, not for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Scalar] = {}
    return_token_strs: bool = False


class LoadAdapterRequest(Schema):
    """Body of /v1/load_lora_adapter, as vLLM and SGLang have it."""

    lora_name: str
    lora_path: str  # a folder below the adapter directory
    load_inplace: bool = False  # replace the adapter of that name
    expected_generation: str | None = None  # replace only this one
    pinned: bool = False
    allow_zero_delta: bool = False
    is_3d_lora_weight: bool = False  # vLLM's, without effect: the weights' shapes tell


class UnloadAdapterRequest(Schema):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: Int | None = None  # vLLM's, without effect: names are enough
    expected_generation: str | None = None


class DetokenizeRequest(AdapterChoice):
    """Body of /detokenize."""

    tokens: List[TokenId]
    skip_special_tokens: bool = False
