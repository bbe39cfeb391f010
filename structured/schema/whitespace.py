"""The whitespace between JSON's tokens: none by default, some where asked, never without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.platform.errors import InvalidRegex
from plait.structured.schema import regex
from plait.structured.spec import GrammarSpec

MAX_RUN = 2  # spaces in a row, where the request bounds them not itself
MAX_ASKED = 16
_JSON = regex.union(((9, 10),), ((13, 13),), ((32, 32),))
# What JSON lets users spell in several ways gets one spelling, so that no key can come twice.
_SOUND = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "item_separator": ",",
    "key_separator": ":",
}


@dataclass(frozen=True, slots=True)
class Whitespace:
    """Compact, or some; by the request's own pattern where it has one."""

    some: bool
    pattern: str | None = None
    notes: tuple[str, ...] = ()


def read(spec: GrammarSpec) -> Whitespace:
    """What a request asks for. Raises where its pattern would let other text in."""
    asked = spec.options.get("whitespace_pattern")
    if asked is None:
        some = spec.options.get("any_whitespace") is True
        return Whitespace(some and spec.options.get("disable_any_whitespace") is not True)
    param = spec.param_of("whitespace_pattern")
    if not isinstance(asked, str):
        raise InvalidRegex("'whitespace_pattern' is a regular expression", param=param)
    try:
        node = _bounded(regex.fullmatch(asked))
    except regex.RegexError as error:
        raise InvalidRegex(f"'whitespace_pattern' has {error}", param=param) from None
    if node == regex.NOTHING:
        raise InvalidRegex(
            "'whitespace_pattern' may match spaces, tabs and line ends only", param=param
        )
    pattern = regex.render(node)
    note = () if pattern == asked else (f"whitespace is bounded: {pattern!r}",)
    return Whitespace(True, pattern, note)


def _bounded(node: regex.Node) -> regex.Node:
    """The same language, within JSON's whitespace and without endless runs."""
    if isinstance(node, regex.Chars):
        return regex.Chars(regex.common(node.ranges, _JSON))
    if isinstance(node, regex.Seq):
        return regex.seq([_bounded(part) for part in node.parts])
    if isinstance(node, regex.Alt):
        return regex.alt([_bounded(option) for option in node.options])
    assert isinstance(node, regex.Repeat), "anchors are gone by now"
    low = min(node.low, MAX_ASKED)
    high = max(low, MAX_RUN) if node.high is None else min(node.high, MAX_ASKED)
    return regex.repeat(_bounded(node.node), low, high)


def for_xgrammar(spaces: Whitespace) -> dict[str, Any]:
    """Keyword arguments of xgrammar's schema compiler."""
    options: dict[str, Any] = {"strict_mode": False, "any_whitespace": spaces.some}
    if spaces.some:
        return options | {"max_whitespace_cnt": MAX_RUN}
    return options | {"separators": (",", ":")}


def for_llguidance(spaces: Whitespace) -> dict[str, Any]:
    """Overrides of llguidance's schema compiler: all are set, since a schema could set them."""
    pattern = spaces.pattern or rf"[\x20\x0A\x0D\x09]{{0,{MAX_RUN}}}"
    if spaces.some:
        return {**_SOUND, "whitespace_flexible": True, "whitespace_pattern": pattern}
    return {**_SOUND, "whitespace_flexible": False, "whitespace_pattern": None}
