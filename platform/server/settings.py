"""What an operator can set about the HTTP server. Frozen; resolved by the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one HTTP request may bring; over a bound it is refused with the number."""

    body_bytes: int = 32 * MIB
    body_timeout_s: float = 60.0  # for the whole body to arrive
    header_bytes: int = 64 << 10
    header_fields: int = 100
    header_timeout_s: float = 30.0  # for a whole head to arrive
    unread_timeout_s: float = 120.0  # that a client may read nothing of its answer
    json_depth: int = 64
    n: int = 16
    stop: int = 4
    prompts: int = 64
    messages: int = 2048
    content_parts: int = 8192  # of all messages together
    chat_template_kwargs: int = 64
    logprobs: int = 20
    stop_token_ids: int = 128
    bad_words: int = 128
    logit_bias: int = 1024
    priority: int = 100  # either side of 0
    render_timeout_s: float = 30.0  # for the template and the tokenizer

    def __post_init__(self) -> None:
        if not 1 <= self.stop <= MAX_STOP_STRINGS:
            raise ValueError(f"the bound on stop strings lies in [1, {MAX_STOP_STRINGS}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where to listen, who may come in, and how long things may take."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket in place of host and port
    root_path: str = ""  # behind a proxy that serves the API under a prefix
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: everyone may come in
    metrics_public: bool = False  # /metrics without a key, where there are keys
    allowed_origins: tuple[str, ...] = ()  # for browsers; empty: no cross-origin requests
    served_model_name: str | None = None  # None: the loaded model's own name
    allow_unknown_fields: bool = False  # log unknown fields once per name, do not refuse them
    log_requests: bool = True
    keep_alive_interval_s: float = 15.0  # of silence in a stream, then a comment; 0: never
    header_delay_s: float = 0.5  # how long a stream waits for an early error before status 200
    shutdown_timeout_s: float = 30.0
    num_threads: int = 4  # for templates, tokenization and decoding
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if any(not key for key in self.api_keys):
            raise ValueError("an API key is empty")
