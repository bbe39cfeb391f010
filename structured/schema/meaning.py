"""What JSON Schema leaves to its readers, decided: formats, and how many forms a value has.

By the standard a format asserts nothing, 1.0 is an integer, and keys have no order. Whoever asks a
model for JSON mostly wants the opposite: dates that parse, integers that typed readers take, the
reasoning in front of the answer. So a schema is taken by the letter where it names a draft of which
all of this is true, and otherwise in the narrow way; a request may choose for itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from plait.structured.spec import GrammarSpec

# Before 2019-09 readers were free to assert formats.
_BY_THE_LETTER = re.compile(r"https?://json-schema\.org/draft/20\d\d-\d\d/schema#?")
# To these drafts a number with a fraction, even of zero, was no integer.
_OLD = re.compile(r"json-schema\.org/draft-0[1-4]/")
# Options of a spec that is narrow whatever its schema says.
NARROW_OPTIONS: dict[str, Any] = {"any_form": False, "assert_formats": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """How one schema is taken."""

    asserts_formats: bool = True
    any_form: bool = False  # values may be written in other forms than the one that is usual
    whole_fractions: bool = True  # 1.0 is an integer
    by_draft: bool = False  # the schema has decided, not the request


NARROW = Meaning()


def read(schema: Any, text: str, spec: GrammarSpec) -> Meaning:
    """The meaning of a schema, whose JSON is `text`, in its request."""
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    named = isinstance(dialect, str) and _BY_THE_LETTER.fullmatch(dialect) is not None
    by_letter = named and not spec.strict
    formats, forms = spec.options.get("assert_formats"), spec.options.get("any_form")
    return Meaning(
        asserts_formats=not by_letter if formats is None else formats is True,
        any_form=by_letter if forms is None else forms is True,
        whole_fractions=_OLD.search(text) is None,
        by_draft=by_letter and formats is None,
    )
