"""Where settings come from: flag over environment over file over default.

Nothing is taken on trust: an unknown key or variable is an error that names the nearest known
one, and every value is read by the same `Flag`, whatever its source.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plait.platform.cli.flags import Flag
from plait.platform.errors import ConfigError

if TYPE_CHECKING:
    import yaml

Part = TypeVar("Part")

PREFIX = "PLAIT_"
# Kubernetes gives every pod variables for each service of its namespace; with a service named
# "plait" they share our prefix and mean nothing to us.
_KUBERNETES = re.compile(r"PLAIT_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Final values by flag key, and where each that is not a default came from."""

    flags: tuple[Flag, ...]
    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def __getitem__(self, key: str) -> Any:
        if key in self.values:
            return self.values[key]
        return next(flag for flag in self.flags if flag.key == key).default

    def origin(self, key: str) -> str:
        """Who set it: "--port", "PLAIT_PORT", "port in plait.yaml", or "default"."""
        return self.origins.get(key, "default")

    def given(self, key: str) -> bool:
        """Whether anyone set it."""
        return key in self.values

    def build(self, part: type[Part], **extra: Any) -> Part:
        """The dataclass `part`, filled with what was set; `extra` goes first."""
        fields = {f.field: self.values[f.key] for f in self._of(part) if f.key in self.values}
        return part(**(fields | extra))

    def _of(self, part: type) -> Iterable[Flag]:
        return (flag for flag in self.flags if flag.part is part)


def resolve(
    flags: tuple[Flag, ...],
    known: tuple[Flag, ...],
    *,
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None = None,
) -> Resolved:
    """Merge the sources for `flags`, those of this command.

    `known` are the flags of all commands: environment and file may serve several of them, so
    a key of another command is allowed there and not used.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    own = {flag.key: flag for flag in flags}
    # Where two commands use one name, this command's own reading of it counts.
    known = tuple(({flag.key: flag for flag in known} | own).values())
    layers = [
        _from_file(known, file) if file else {},
        _from_environment(known, environ),
        _from_command_line(flags, given),
    ]
    for layer in layers:
        for key, (value, origin) in layer.items():
            if key in own:
                values[key], origins[key] = value, origin
    return Resolved(flags, values, origins)


def nearest(word: str, known: Iterable[str]) -> str:
    """A question whether the nearest known word was meant; nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


Layer = dict[str, tuple[Any, str]]


def _from_command_line(flags: tuple[Flag, ...], given: Mapping[str, Any]) -> Layer:
    layer: Layer = {}
    for flag in flags:
        raw = given.get(flag.key)
        if raw is None or raw == []:
            continue
        origin = flag.spelling.upper() if flag.argument else f"--{flag.spelling}"
        layer[flag.key] = (flag.read_yaml(raw, origin), origin)
    return layer


def _from_environment(known: tuple[Flag, ...], environ: Mapping[str, str]) -> Layer:
    by_variable = {flag.variable: flag for flag in known}
    layer: Layer = {}
    for variable in sorted(v for v in environ if v.startswith(PREFIX)):
        flag = by_variable.get(variable)
        if flag is not None and not _from_kubernetes(variable, environ[variable]):
            layer[flag.key] = (flag.read_text(environ[variable], variable), variable)
        elif flag is None and not _KUBERNETES.fullmatch(variable):
            raise ConfigError(
                f"the environment sets {variable}, which is no setting of plait."
                f"{nearest(variable, by_variable)} Unset it, or see `plait serve --help`",
                param=variable,
            )
    return layer


def _from_kubernetes(variable: str, text: str) -> bool:
    """PLAIT_PORT=tcp://10.0.0.1:8000 is Kubernetes' word about a service, not a port for us."""
    return variable == "PLAIT_PORT" and text.startswith(("tcp://", "udp://"))


def _from_file(known: tuple[Flag, ...], path: Path) -> Layer:
    by_key = {flag.key: flag for flag in known}
    layer: Layer = {}
    for key, value in _load_yaml(path).items():
        flag = by_key.get(str(key).replace("-", "_"))
        origin = f"{key} in {path.name}"
        if flag is None:
            names = [flag.spelling for flag in known]
            raise ConfigError(
                f"{origin} is no setting of plait.{nearest(str(key).replace('_', '-'), names)}",
                param=str(key),
            )
        if value is None:
            raise ConfigError(f"{origin} has no value: give it one or delete the line")
        if flag.key in layer:
            raise ConfigError(f"{layer[flag.key][1]} is set twice, as {key} too: keep one")
        layer[flag.key] = (flag.read_yaml(value, origin), origin)
    return layer


def _load_yaml(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        loaded = yaml.load(path.read_text("utf-8"), Loader=_strict_loader())  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold `name: value` lines, such as `port: 8001`")
    return loaded


def _strict_loader() -> type[yaml.SafeLoader]:
    """A SafeLoader that refuses a key set twice, where YAML would silently take the last."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[Hashable, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = {str(key) for key in keys if keys.count(key) > 1}
            if twice:
                raise yaml.YAMLError(f"{', '.join(sorted(twice))} is set twice")
            return super().construct_mapping(node, deep)

    return StrictLoader
