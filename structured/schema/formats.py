"""The standard's string formats: which are enforced, by what, and which are refused.

By the standard a format is an annotation; whoever sends one with a grammar wants it kept, as
OpenAI does. Names that the standard does not know assert nothing.
"""

from __future__ import annotations

# llguidance 1.7 and 1.9 hold these.
ENFORCED = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)


def _references(others: str) -> tuple[str, str]:
    """RFC 3986's identifiers, and references, with other characters. No IP literals."""
    char = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@{others}-]|%[0-9A-Fa-f]{{2}})"
    host = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:{others}-]|%[0-9A-Fa-f]{{2}})*"
    no_colon = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@{others}-]|%[0-9A-Fa-f]{{2}})+"
    network = rf"//(?:{host}@)?{_host(others)}(?::[0-9]*)?(?:/{char}*)*"
    absolute = rf"/(?:{char}+(?:/{char}*)*)?"
    rootless = rf"{char}+(?:/{char}*)*"
    scheme = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{network}|{absolute}|{rootless})?"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    relative = rf"{network}|{absolute}|{no_colon}(?:/{char}*)*"
    return rf"^{scheme}{tail}$", rf"^(?:{scheme}|{relative})?{tail}$"


def _host(others: str) -> str:
    return rf"(?:[A-Za-z0-9._~!$&'()*+,;={others}-]|%[0-9A-Fa-f]{{2}})*"


# RFC 3987's further characters.
_UCS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\u{10000}-\u{1fffd}\u{20000}-\u{2fffd}"

# Ours, by their RFCs.
PATTERNS = {
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "uri-reference": _references("")[1],
    "iri": _references(_UCS)[0],
    "iri-reference": _references(_UCS)[1],
}

REFUSED = frozenset({"idn-email", "idn-hostname", "regex", "uri-template"})
