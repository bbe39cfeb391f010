"""What a client asked: `Request`, and what it may hold beside text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.platform.core.params import SamplingParams
from plait.platform.core.values import InvalidParameter, integer_or_none, switch


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
        object.__setattr__(self, "enabled", switch("speculation.enabled", self.enabled))
        name = "speculation.max_tokens"
        most = integer_or_none(name, self.max_tokens)
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
