"""What an operator can set about the HTTP server. Frozen; resolved by the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.adapters.composition import MAX_ADAPTERS
from plait.platform.server.access import Grant
from plait.vision.limits import ImageLimits

MIB = 1 << 20
MAX_STOP_STRINGS = 16
TENSOR_PATHS = frozenset({"/load_lora_adapter_from_tensors", "/v1/load_lora_adapter_from_tensors"})
IMAGE_PATHS = frozenset({"/v1/chat/completions", "/tokenize"})  # whose messages may have images
# What changes the adapters: there only where there is an admin key.
ADMIN_PATHS = TENSOR_PATHS | {
    "/load_lora_adapter",
    "/v1/load_lora_adapter",
    "/unload_lora_adapter",
    "/v1/unload_lora_adapter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSource:
    """An adapter to load at start: its name, and a directory or hub id (`owner/name@revision`)."""

    name: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one HTTP request may bring; over a bound it is refused with the number."""

    body_bytes: int = 32 * MIB
    image_body_bytes: int = 88 * MIB  # of a chat, where the model takes images
    adapter_body_bytes: int = 1024 * MIB  # of an adapter's tensors, sent by an admin
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
    images: int = 16
    image_bytes: int = 20 * MIB  # of one file
    image_pixels: int = 33_177_600  # of one, by its header
    adapters: int = MAX_ADAPTERS
    lora: int = MAX_ADAPTERS
    logprobs: int = 20
    stop_token_ids: int = 128
    bad_words: int = 128
    logit_bias: int = 1024
    priority: int = 100  # either side of 0
    render_timeout_s: float = 30.0  # for the template and the tokenizer

    def __post_init__(self) -> None:
        if not 1 <= self.stop <= MAX_STOP_STRINGS:
            raise ValueError(f"the bound on stop strings lies in [1, {MAX_STOP_STRINGS}]")

    def for_images(self) -> ImageLimits:
        """The bounds on a request's images."""
        usual = ImageLimits()
        of_request = max(usual.request_bytes, self.image_bytes)
        return ImageLimits(
            num_images=self.images,
            image_bytes=self.image_bytes,
            image_pixels=self.image_pixels,
            request_bytes=of_request,
            file_budget_bytes=max(usual.file_budget_bytes, of_request),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where to listen, who may come in, and how long things may take."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # a Unix socket in place of host and port
    root_path: str = ""  # behind a proxy that serves the API under a prefix
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: everyone may come in
    grants: tuple[Grant, ...] = field(default=(), repr=False)  # keys that have limits
    admin_key: str | None = field(default=None, repr=False)  # None: adapters cannot be changed
    metrics_public: bool = False  # /metrics without a key, where there are keys
    allowed_origins: tuple[str, ...] = ()  # for browsers; empty: no cross-origin requests
    served_model_name: str | None = None  # None: the loaded model's own name
    adapters: tuple[NamedSource, ...] = ()  # loaded at start
    allowed_media: tuple[str, ...] = ()  # hosts that images are fetched from
    adapter_dir: str | None = None  # adapters that a request or an admin may have loaded
    max_adapters: int = 1024  # names
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
        if self.admin_key == "":
            raise ValueError("the admin key is empty")
        # Whoever compares paths has it before them, so it may not differ by a slash.
        object.__setattr__(self, "root_path", self.root_path.rstrip("/"))

    def takes_tensors(self, path: str) -> bool:
        """Whether what is posted to `path` (without the root path) is an adapter's weights."""
        return self.admin_key is not None and path in TENSOR_PATHS

    def body_bytes(self, path: str, *, takes_images: bool = False) -> int:
        """The largest body that `path` takes; `takes_images`: whether the model does."""
        if self.takes_tensors(path):
            return self.limits.adapter_body_bytes
        if takes_images and path in IMAGE_PATHS:
            return max(self.limits.body_bytes, self.limits.image_body_bytes)
        return self.limits.body_bytes
