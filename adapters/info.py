"""What is known of a loaded adapter, as data that crosses processes. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that an adapter's tokenizer has beside the model's, as transformers describes it."""

    token_id: int
    text: str
    special: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


CHANGES_NOTHING = (
    "the adapter changes nothing: every change in it is zero, as before training; "
    "allow_zero_delta loads it all the same"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """One site that the adapter changes."""

    name: str
    kind: str  # low_rank | dora | rows | whole
    rank: int  # 0 where nothing is low-rank
    scale: float
    change_norm: float  # Frobenius norm of the change of the weight, the scale included


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What loading an adapter found; also the body of a refusal."""

    sites: tuple[SiteReport, ...] = ()
    num_tensors: int = 0
    unmatched: tuple[str, ...] = ()  # tensors that fit no site: the adapter is refused
    not_finite: tuple[str, ...] = ()  # tensors with NaN or infinity: the adapter is refused
    changes_kv: bool = False
    changes_tower: bool = False
    changes_head: bool = False
    changes_vocabulary: bool = False
    num_bytes: int = 0  # in memory, in the dtypes of the file
    warnings: tuple[str, ...] = ()  # such as another base's name in the config


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """What every part may know of one generation."""

    generation: str
    report: LoadReport
    kv_digest: str = ""  # see `core.AdapterUse`
    tower_digest: str = ""  # SHA-256 of what changes the tower or projector; empty: nothing
    invocation_token_ids: tuple[int, ...] = ()  # aLoRA: active from their last occurrence on
    vocab_size: int | None = None  # width of the logits, where it adds tokens
    changes_nothing: bool = False  # loaded all the same, as who loaded it allowed
    draft: str = ""  # generation under which the draft model has an adapter that goes with it
    has_dora: bool = False  # it cannot be combined with other adapters
    num_bytes: int = 0  # host memory
    device_bytes: int = 0  # once placed by the executor
    device_dtype: str = ""  # of its low-rank weights there
    base_model: str = ""  # that its config names


class AdapterLevel:
    """Where an adapter's weights lie, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    LOST = "lost"  # nowhere: an engine that was started anew could not read it


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """How one generation stands in the engine's pool."""

    level: str  # of `AdapterLevel`
    leases: int = 0  # sequences that run with it
    waiting: int = 0  # sequences that wait for it
    pinned: bool = False
