"""From a constraint to a compiled grammar: choose the backend, have it compile, name the result.

Runs in a compile worker, where it may be stopped at any moment.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from plait.platform.errors import BadRequest, GrammarTooComplex, InvalidGrammar
from plait.structured import backends
from plait.structured.spec import CompiledGrammar, GrammarKind, GrammarSpec
from plait.structured.trial import Clock, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.structured.vocabulary import Vocabulary

MAX_PAYLOAD_BYTES = 8 << 20  # takes the engine nearly a second to load

# What a loaded llguidance grammar takes: its lexer's states, beside its text.
_LLGUIDANCE_BYTES = 256 << 10
_LLGUIDANCE_TEXT_FACTOR = 16


class Routed(Protocol):
    """What the compiler reads of a `Route`."""

    @property
    def backend(self) -> str:
        """Name of the backend."""
        ...

    @property
    def kind(self) -> GrammarKind:
        """What `content` is."""
        ...

    @property
    def content(self) -> Any:
        """What the backend compiles."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """In the backend's own words."""
        ...


class Compiler:
    """Compiles for one vocabulary. Its backends, with the rules they share, live as long as it.

    With a `clock` of processor time, grammars whose masks take too long are refused.
    """

    def __init__(self, vocabulary: Vocabulary, *, clock: Clock | None = None) -> None:
        self._vocabulary = vocabulary
        self._trial = Trial(vocabulary=vocabulary, clock=clock) if clock is not None else None
        self._backends: dict[str, backends.Backend] = {}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Route and compile. Raises the `BadRequest` of what cannot be, with the spec's `param`."""
        from plait.structured.router import route

        try:
            if spec.kind is not GrammarKind.JSON_SCHEMA:  # which is read anyway
                json.dumps(spec.content, ensure_ascii=False).encode()  # not half a pair
            return self.compile_route(route(spec, build=False))
        except BadRequest as error:
            error.param = error.param or spec.param
            raise
        except RecursionError:
            raise GrammarTooComplex("it is nested too deeply", param=spec.param) from None
        except UnicodeError:
            raise InvalidGrammar("it has half a surrogate pair", param=spec.param) from None

    def compile_route(self, route: Routed) -> CompiledGrammar:
        """Compile what has been routed."""
        backends.check_version(route.backend)
        backend = self._backend(route.backend)
        spent = -self._now()
        try:
            payload = backend.compile(route.kind, route.content, route.options)
        except BadRequest as error:
            if not isinstance(error.__cause__, backends.LibraryError):
                raise
            if instead := getattr(route, "instead", None):
                return self.compile_route(instead())
            if refusal := getattr(route, "refusal", None):
                raise refusal(str(error.__cause__)) from None
            raise
        spent += self._now()
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise GrammarTooComplex(
                f"compiled it takes {len(payload):,} bytes, {MAX_PAYLOAD_BYTES:,} are the limit"
            )
        compiled = CompiledGrammar(
            key=grammar_key(route, self._vocabulary),
            backend=route.backend,
            payload=payload,
            num_bytes=loaded_bytes(route.backend, payload),
            vocabulary=self._vocabulary.digest,
            notes=tuple(getattr(route, "notes", ())),
            checks=getattr(route, "checks", b""),
        )
        if self._trial is not None:
            self._trial.check(compiled, backend, compile_s=spent)
        return compiled

    def _now(self) -> float:
        return 0.0 if self._trial is None else self._trial.clock()

    def warm(self) -> None:
        """Load the libraries and compile the fragments that most schemas have."""
        from plait.structured.router import route

        spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=COMMON)
        for name in backends.NAMES:
            self._backend(name).compile(spec.kind, spec.content, {})
        route(spec)
        if self._trial is not None:
            self._trial.warm()

    def _backend(self, name: str) -> backends.Backend:
        if name not in self._backends:
            self._backends[name] = backends.create(name, self._vocabulary, only_compiles=True)
        return self._backends[name]


def compile_route(route: Routed, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile one route, with backends of its own."""
    return Compiler(vocabulary).compile_route(route)


COMMON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "amount": {"type": "number"},
        "flag": {"type": "boolean"},
        "time": {"type": "string", "format": "date-time"},
        "mail": {"type": "string", "format": "email"},
        "texts": {"type": "array", "items": {"type": "string"}},
        "free": {"type": "object"},
    },
    "required": ["text"],
    "additionalProperties": False,
}


def grammar_key(route: Routed, vocabulary: Vocabulary) -> str:
    """SHA-256 (hex) over all that decides what a matcher allows."""
    content = [
        route.backend,
        backends.version(route.backend),
        vocabulary.digest,
        route.kind,
        route.content,
        sorted(route.options.items()),
        getattr(route, "checks", b"").decode(),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def loaded_bytes(backend: str, payload: bytes) -> int:
    """What a loaded grammar takes in memory, about."""
    if backend == "xgrammar":
        return len(payload)
    return _LLGUIDANCE_BYTES + _LLGUIDANCE_TEXT_FACTOR * len(payload)
