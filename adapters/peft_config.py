"""`adapter_config.json` as PEFT means it: every key is understood, known harmless, or refused.

Defaults are PEFT's own, which is not what other tools assume: a config without `lora_alpha` has
alpha 8, whatever its rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.adapters.files import CONFIG, FileLimits, parse_json
from plait.adapters.patterns import Pattern, compile_pattern
from plait.platform.errors import InvalidAdapter

# They decide nothing of what an adapter computes.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
# They change what an adapter computes in ways that are not served.
_REFUSED = frozenset(
    {
        "arrow_config",
        "ensure_weight_tying",
        "kasa_config",
        "layer_replication",
        "megatron_config",
        "monteclora_config",
        "use_bdlora",
        "use_qalora",
    }
)
_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# Their update belongs to a base whose weights were changed at the start of training.
_INITS_THAT_SHIFT = ("pissa", "olora", "corda", "loftq", "lora_ga")

_MAX_LIST = 100_000
_MAX_PATTERNS = 256  # of one key, names aside: each may take a while
_MAX_INVOCATION = 4096

Names = frozenset[str]  # looked up by the suffixes of a module's name: files may list many


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """What an adapter's config says, with PEFT's defaults filled in."""

    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    rank_pattern: tuple[tuple[Pattern, int], ...] = ()  # the first that matches counts
    alpha_pattern: tuple[tuple[Pattern, float], ...] = ()
    target_modules: Names | Pattern | None = None  # suffixes, or a pattern of whole names
    exclude_modules: Names | Pattern | None = None
    target_parameters: Names = frozenset()
    modules_to_save: Names = frozenset()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[Pattern, ...] = ()
    trained_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # "": embedding
    invocation_tokens: tuple[int, ...] = ()
    base_model: str = ""
    peft_version: str = ""

    def rank(self, name: str) -> int:
        """The rank at the module (or parameter) of that name."""
        return next((r for p, r in self.rank_pattern if p.match_suffix(name)), self.r)

    def scale(self, name: str) -> float:
        """What the low-rank product there is multiplied with."""
        alpha = next((a for p, a in self.alpha_pattern if p.match_suffix(name)), self.lora_alpha)
        rank = self.rank(name)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @property
    def max_rank(self) -> int:
        """The largest rank that it names."""
        return max([self.r, *(r for _, r in self.rank_pattern)])


def parse_config(data: bytes, limits: FileLimits | None = None) -> PeftConfig:
    """Read and check a config. Raises `InvalidAdapter`, which names the key at fault."""
    content = parse_json(data, CONFIG, limits or FileLimits())
    if not isinstance(content, dict):
        raise InvalidAdapter(f"{CONFIG} is not a JSON object")
    return check_config(content)


def check_config(content: Mapping[str, Any]) -> PeftConfig:
    """A config that was parsed already. Raises `InvalidAdapter`, which names the key at fault."""
    # Null, false and empty stand for "not used", even of what we do not know.
    given = {k: v for k, v in content.items() if not (v is None or v is False or v in ({}, []))}
    kind = given.pop("peft_type", "LORA")
    if kind != "LORA":
        _refuse("peft_type", kind, "only LORA adapters are served")
    _check_init(given.pop("init_lora_weights", True))
    if given.pop("bias", "none") != "none":
        _refuse("bias", content["bias"], "only an adapter that leaves the base's biases is served")
    for key in sorted(_REFUSED & given.keys()):
        _refuse(key, given[key], "it is not served")
    given = {k: v for k, v in given.items() if k not in _HARMLESS}
    given.pop("fan_in_fan_out", None)  # how the base stores its weights; A and B are as ever
    fields: dict[str, Any] = {}
    for key, (name, read) in _READERS.items():
        if key in given:
            fields[name] = read(key, given.pop(key))
    for key in sorted(given):
        _refuse(key, given[key], "this key is not known, so what it changes is not either")
    config = PeftConfig(**fields)
    _check_together(config)
    return config


def _refuse(key: str, value: Any, why: str) -> None:
    raise InvalidAdapter(f"{CONFIG}: {key[:100]} = {value!r:.200}: {why}", param=key[:100])


def _check_init(value: Any) -> None:
    if value is True:
        return
    name = str(value).lower()
    if isinstance(value, str) and name.startswith(_INITS_THAT_SHIFT):
        _refuse(
            "init_lora_weights",
            value,
            "it was trained beside a changed base; save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes it an ordinary adapter",
        )
    if not isinstance(value, str) or name not in _INITS:
        _refuse("init_lora_weights", value, "this initialisation is not known")


def _check_together(config: PeftConfig) -> None:
    if config.target_parameters:
        for key in ("use_dora", "lora_bias"):
            if getattr(config, key):
                _refuse(key, True, "PEFT has no such thing together with target_parameters")
    if config.use_dora and config.lora_bias:
        _refuse("lora_bias", True, "PEFT has no such thing together with use_dora")
    if config.invocation_tokens:
        for key in ("use_dora", "target_parameters", "modules_to_save", "trained_tokens"):
            if getattr(config, key):
                name = "trainable_token_indices" if key == "trained_tokens" else key
                _refuse(name, True, "it is not served together with alora_invocation_tokens")


# --- values ---------------------------------------------------------------------------------


def _flag(key: str, value: Any) -> bool:
    if value is not True:
        _refuse(key, value, "true or false is wanted")
    return True


def _rank(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
        _refuse(key, value, "a rank is a whole number of at least 1")
    return int(value)


def _number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        _refuse(key, value, "a number is wanted")
    return float(value)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        _refuse(key, value, "text is wanted")
    return str(value)[:1000]


def _names(key: str, value: Any) -> Names:
    return frozenset(_texts(key, value))


def _texts(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        _refuse(key, value, "a list of names is wanted")
    return list(value)


def _names_or_pattern(key: str, value: Any) -> Names | Pattern | None:
    if value == "all-linear":
        return compile_pattern(key, ".*")
    return compile_pattern(key, value) if isinstance(value, str) else _names(key, value)


def _patterns(key: str, value: Any) -> tuple[Pattern, ...]:
    values = [value] if isinstance(value, str) else _texts(key, value)
    if len(values) > _MAX_PATTERNS:
        _refuse(key, value, f"at most {_MAX_PATTERNS} patterns are read")
    return tuple(compile_pattern(key, v) for v in values)


def _by_pattern(
    read: Callable[[str, Any], Any],
) -> Callable[[str, Any], tuple[tuple[Pattern, Any], ...]]:
    def parse(key: str, value: Any) -> tuple[tuple[Pattern, Any], ...]:
        if not isinstance(value, dict) or len(value) > _MAX_LIST:
            _refuse(key, value, "an object of patterns and numbers is wanted")
        found, num_patterns = [], 0
        for text, number in value.items():
            found.append((compile_pattern(key, text), read(key, number)))
            num_patterns += not found[-1][0].is_name
            if num_patterns > _MAX_PATTERNS:
                _refuse(key, value, f"at most {_MAX_PATTERNS} patterns are read, beside names")
        return tuple(found)

    return parse


def _counts(key: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if len(values) > _MAX_LIST or not all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 31 for v in values
    ):
        _refuse(key, value, "whole numbers of at least 0 are wanted")
    return tuple(values)


def _token_lists(key: str, value: Any) -> Mapping[str, tuple[int, ...]]:
    lists = value if isinstance(value, dict) else {"": value}
    found = {module: _counts(key, ids) for module, ids in lists.items()}
    for ids in found.values():
        if len(set(ids)) != len(ids):
            _refuse(key, value, "a token stands twice")
    return found


def _invocation(key: str, value: Any) -> tuple[int, ...]:
    ids = _counts(key, value)
    if len(ids) > _MAX_INVOCATION:
        _refuse(key, value, f"at most {_MAX_INVOCATION} tokens may invoke an adapter")
    return ids


_READERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "r": ("r", _rank),
    "lora_alpha": ("lora_alpha", _number),
    "use_rslora": ("use_rslora", _flag),
    "use_dora": ("use_dora", _flag),
    "lora_bias": ("lora_bias", _flag),
    "rank_pattern": ("rank_pattern", _by_pattern(_rank)),
    "alpha_pattern": ("alpha_pattern", _by_pattern(_number)),
    "target_modules": ("target_modules", _names_or_pattern),
    "exclude_modules": ("exclude_modules", _names_or_pattern),
    "target_parameters": ("target_parameters", _names),
    "modules_to_save": ("modules_to_save", _names),
    "layers_to_transform": ("layers_to_transform", _counts),
    "layers_pattern": ("layers_pattern", _patterns),
    "trainable_token_indices": ("trained_tokens", _token_lists),
    "alora_invocation_tokens": ("invocation_tokens", _invocation),
    "base_model_name_or_path": ("base_model", _text),
    "peft_version": ("peft_version", _text),
}
