"""The standard's string formats, as patterns by their RFCs; and which are refused.

By the standard a format is an annotation; whoever sends one with a grammar wants it kept, as
OpenAI does. Names that the standard does not know assert nothing. Where readers disagree on what
an RFC allows, such as the second 60, it is left out: what is given shall be valid to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """The strings in which all of the patterns are found, up to a number of characters."""

    patterns: tuple[str, ...]
    longest: int | None = None


def _whole(pattern: str) -> Form:
    return Form((f"^(?:{pattern})$",))


# --- times: RFC 3339 ---

# February 29 only where there was one, and no year 0, which calendars of programs lack.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29"
)
# No second 60: whether there was one, only a table of the past can tell.
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"
_SPAN_OF_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_SPAN_OF_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_SPAN = f"P(?:{_SPAN_OF_DAYS}(?:{_SPAN_OF_TIME})?|{_SPAN_OF_TIME}|[0-9]+W)"

# --- hosts: RFC 1123, 4291, 5321 ---

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"


def _ipv6() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    last = f"(?:{group}:{group}|{_IPV4})"
    ends = [*(f"(?:{group}:){{{count}}}{last}" for count in (4, 3, 2, 1, 0)), group, ""]
    shortened = [
        f"(?:(?:{group}:){{0,{before}}}{group})?::{end}" for before, end in enumerate(ends)
    ]
    return "|".join([f"(?:{group}:){{6}}{last}", f"::(?:{group}:){{5}}{last}", *shortened])


_IPV6 = _ipv6()
# Labels of up to 63 characters. Without -- as their third and fourth, which only the names of other
# scripts have, in an encoding that no pattern tells from garbage.
_LETTER, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = (
    f"{_LETTER}(?:{_INNER}{{0,2}}{_LETTER}"
    f"|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})?"
)
_HOST = rf"(?:{_LABEL}\.)*{_LABEL}"
# The last label has more than digits, as in no address.
_NAMED = r"[A-Za-z-][A-Za-z0-9-]*$"
_WORD = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_EMAIL = rf"{_WORD}(?:\.{_WORD})*@(?:{_HOST}|\[{_IPV4}\])"

# --- identifiers: RFC 3986, 3987, 6901 ---

# Up to 65535, and none.
_PORT = "[0-9]{0,4}|[1-5][0-9]{4}|6(?:[0-4][0-9]{3}|5(?:[0-4][0-9]{2}|5(?:[0-2][0-9]|3[0-5])))"


def _references(others: str) -> tuple[Form, Form]:
    """RFC 3986's identifiers, and references, with other characters."""
    char = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@{others}-]|%[0-9A-Fa-f]{{2}})"
    user = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:{others}-]|%[0-9A-Fa-f]{{2}})*"
    host = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;={others}-]|%[0-9A-Fa-f]{{2}})*|\[(?:{_IPV6})\])"
    no_colon = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@{others}-]|%[0-9A-Fa-f]{{2}})+"
    network = rf"//(?:{user}@)?{host}(?::(?:{_PORT}))?(?:/{char}*)*"
    absolute = rf"/(?:{char}+(?:/{char}*)*)?"
    rootless = rf"{char}+(?:/{char}*)*"
    scheme = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{network}|{absolute}|{rootless})?"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    relative = rf"{network}|{absolute}|{no_colon}(?:/{char}*)*"
    return _whole(scheme + tail), _whole(rf"(?:{scheme}|{relative})?{tail}")


# RFC 3987's further characters, but for those that turn the direction of text.
_UCS = (
    r"\u00a0-\u200d\u2010-\u2029\u202f-\u2065\u2070-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    r"\u{10000}-\u{1fffd}\u{20000}-\u{2fffd}"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

FORMS = {
    "date": _whole(_DATE),
    "time": _whole(_TIME),
    "date-time": _whole(f"(?:{_DATE})[Tt]{_TIME}"),
    "duration": _whole(_SPAN),
    "hostname": Form((f"^{_HOST}$", _NAMED), longest=253),
    # The part in front of the @ has its own bound.
    "email": Form((f"^{_EMAIL}$", "^[^@]{1,64}@"), longest=254),
    "ipv4": _whole(_IPV4),
    "ipv6": _whole(_IPV6),
    "uuid": _whole("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"),
    "json-pointer": _whole(_POINTER),
    "relative-json-pointer": _whole(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    "uri": _references("")[0],
    "uri-reference": _references("")[1],
    "iri": _references(_UCS)[0],
    "iri-reference": _references(_UCS)[1],
}

REFUSED = frozenset({"idn-email", "idn-hostname", "regex", "uri-template"})
