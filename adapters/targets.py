"""Which modules and parameters a config says it targets, by PEFT's rules.

The tensors decide what an adapter changes. These rules tell whether PEFT would agree: a tensor
that it would ignore is refused.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

from plait.adapters.patterns import Pattern
from plait.adapters.peft_config import PeftConfig

_MAX_WARNINGS = 16
_FIRST_NUMBER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


def is_target_module(config: PeftConfig, name: str) -> bool:
    """Whether PEFT would put LoRA on the module of that name.

    Without `target_modules` PEFT takes a default of the architecture: everything may be meant.
    """
    excluded, targets = config.exclude_modules, config.target_modules
    if isinstance(excluded, Pattern) and excluded.match_whole(name):
        return False
    if isinstance(excluded, frozenset) and _has_suffix(name, excluded):
        return False
    if targets is None:
        return not config.target_parameters
    if isinstance(targets, Pattern):
        return targets.match_whole(name)
    # A name in full goes before the choice of layers.
    return name in targets or (_has_suffix(name, targets) and _is_chosen_layer(config, name))


def is_target_parameter(config: PeftConfig, name: str) -> bool:
    """Whether PEFT would put LoRA on the parameter of that name."""
    return _has_suffix(name, config.target_parameters)


def _has_suffix(name: str, suffixes: Container[str]) -> bool:
    return any(suffix in suffixes for suffix in _suffixes(name))


def _suffixes(name: str) -> Iterator[str]:
    """The name, and what follows each of its dots."""
    yield name
    at = name.find(".")
    while at >= 0:
        yield name[at + 1 :]
        at = name.find(".", at + 1)


def _is_chosen_layer(config: PeftConfig, name: str) -> bool:
    if not config.layers_to_transform:
        return True
    if config.layers_pattern:
        found = (pattern.layer(name) for pattern in config.layers_pattern)
        layer = next((n for n in found if n is not None), None)
    else:
        match = _FIRST_NUMBER.match(name)
        layer = None if match is None else int(match["idx"])
    return layer in config.layers_to_transform


def warnings_of_targets(config: PeftConfig, modules: Iterable[str]) -> tuple[str, ...]:
    """What the config targets without a tensor for it in the file."""
    targets = config.target_modules
    if not isinstance(targets, frozenset):
        return ()
    found = {suffix for name in modules for suffix in _suffixes(name)}
    missing = sorted(targets - found)
    more = [f"and {len(missing) - _MAX_WARNINGS} more"] if len(missing) > _MAX_WARNINGS else []
    return tuple(
        f"target_modules has {t[:200]!r}, and the file has no tensors of it"
        for t in missing[:_MAX_WARNINGS]
    ) + tuple(more)
