"""JSON values: their types and equality as JSON Schema has them (1 is 1.0, true is not 1)."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from json.encoder import encode_basestring_ascii
from typing import Any

_NUMBERS = (int, float)
TYPES = ("null", "boolean", "number", "string", "array", "object")


def type_of(value: Any) -> str:
    """The JSON type of a value; integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, _NUMBERS):
        return "number"
    return "array" if isinstance(value, list) else "object"


def is_integer(value: Any) -> bool:
    """Whether a number has no fraction, however it is written."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def exact(number: float) -> Fraction:
    """A number as it is written in decimal, not as binary floating point holds it."""
    return Fraction(number) if isinstance(number, int) else Fraction(Decimal(repr(number)))


def canonical(value: Any) -> Any:
    """The value with one spelling for equal values: no integral floats, keys sorted."""
    if isinstance(value, float) and value.is_integer() and math.isfinite(value):
        return int(value)
    if isinstance(value, list):
        return [canonical(each) for each in value]
    if isinstance(value, dict):
        return {key: canonical(value[key]) for key in sorted(value)}
    return value


def identity(value: Any) -> str:
    """A text that is the same for equal values and for no others."""
    if isinstance(value, str):  # what most values are, at a tenth of the price
        return encode_basestring_ascii(value)
    return json.dumps(canonical(value), ensure_ascii=True, separators=(",", ":"))


def compact(value: Any) -> str:
    """A value as text without whitespace, its keys in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
