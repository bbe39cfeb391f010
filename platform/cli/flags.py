"""What a flag is: one line of a table.

From it the option, the environment variable, the YAML key, the help text and the type check are
derived. Type and default come from the dataclass field it fills, so they are written once too.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any

from plait.platform.cli.values import ADAPTER, BY_TYPE, TEXT, Kind, split_adapters
from plait.platform.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting of one part: `part.field`, spelled `--name` on the command line.

    `low` and `high` are inclusive bounds; `choices` the only values allowed. `kind` is set
    only where the field's type does not tell how to read it (sizes).
    """

    part: type
    field: str
    help: str
    name: str = ""  # default: the field's name with dashes
    short: str | None = None
    aliases: tuple[str, ...] = ()  # other servers' spellings, without dashes in front
    kind: Kind | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    metavar: str | None = None
    argument: bool = False  # the command's positional argument
    panel: str | None = None  # the heading it stands under in help

    @property
    def key(self) -> str:
        """The name in YAML and in Python: `max_model_len`."""
        return self.spelling.replace("-", "_")

    @property
    def spelling(self) -> str:
        """The name on the command line, without dashes in front."""
        return self.name or self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "PLAIT_" + self.key.upper()

    @property
    def default(self) -> Any:
        """What holds where nobody says otherwise."""
        return _defaults(self.part)[self.field]

    @property
    def is_list(self) -> bool:
        """Whether the flag may be given several times."""
        return isinstance(self.default, tuple)

    @property
    def value_kind(self) -> Kind:
        """How to read one value."""
        return self.kind or BY_TYPE[_scalar_type(self.part, self.field)]

    def read_text(self, text: str, origin: str) -> Any:
        """The checked value of a flag's or a variable's text; a list is comma-separated."""
        if self.is_list:
            split = split_adapters if self.value_kind is ADAPTER else _split
            return tuple(self._read(item, origin) for item in split(text))
        return self._read(text, origin)

    def read_yaml(self, value: object, origin: str) -> Any:
        """The checked value of a YAML node."""
        if self.is_list:
            items = value if isinstance(value, list) else [value]
            if self.value_kind not in (TEXT, ADAPTER):  # which may hold commas
                items = [part for item in items for part in _split(item)]
            if self.value_kind is ADAPTER:  # a path may hold commas here, but a list is a list
                items = [part for item in items for part in _json_list(item)]
            return tuple(self._read(item, origin) for item in items)
        return self._read(value, origin)

    def _read(self, raw: object, origin: str) -> Any:
        kind = self.value_kind
        try:
            return self.check(kind.parse(raw) if isinstance(raw, str) else kind.from_yaml(raw))
        except ValueError as error:
            shown = "the value given" if self.secret else repr(raw)
            raise ConfigError(f"{origin} wants {error}, not {shown}", param=self.spelling) from None

    def check(self, value: Any) -> Any:
        """`value`, if it lies within the flag's bounds; raises `ValueError` otherwise."""
        if self.choices and value not in self.choices:
            raise ValueError("one of " + ", ".join(self.choices))
        if self.low is not None and value < self.low:
            raise ValueError(f"at least {self.low:g}")
        if self.high is not None and value > self.high:
            raise ValueError(f"at most {self.high:g}")
        return value


def flag(part: type, panel: str, field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    """`Flag` with what each one has by position."""
    return Flag(part=part, panel=panel, field=field, help=help, **more)


def _split(value: object) -> list[Any]:
    """The items of a comma-separated text; anything else is one item."""
    if not isinstance(value, str):
        return [value]
    return [item.strip() for item in value.split(",") if item.strip()]


def _json_list(item: object) -> list[Any]:
    is_list = isinstance(item, str) and item.lstrip().startswith("[")
    return split_adapters(str(item)) if is_list else [item]


@functools.cache
def _defaults(part: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = field.default
    return found


@functools.cache
def _scalar_type(part: type, field: str) -> type:
    """The type of one value of a field: `int` for `int | None`, `str` for `tuple[str, ...]`."""
    hint = typing.get_type_hints(part)[field]
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return typing.cast("type", hint)
