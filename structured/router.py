"""Which backend enforces a constraint, and in what words: proven, or refused by name.

A schema is read and written again (`plait.structured.schema`); where xgrammar is proven exact and
cheap for what was written it goes there, else to llguidance, which is asked whether it can. A
constraint that neither enforces is refused. Nothing is loosened on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, cast

from plait.platform.errors import (
    GrammarTooComplex,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    UnsupportedSchemaKeyword,
)
from plait.structured.schema import prove, regex, whitespace
from plait.structured.schema.normalise import Normalised, normalise
from plait.structured.schema.refusal import Refusal
from plait.structured.spec import GrammarKind, GrammarSpec

Backend = Literal["xgrammar", "llguidance"]
MAX_TEXT_BYTES = 64 * 1024
MAX_CHOICES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A constraint ready for one backend.

    `content` and `options` are the arguments of the backend's own compile call for `kind`: a JSON
    schema with its keyword arguments (xgrammar) or overrides (llguidance), a regular expression
    for whole strings, an EBNF or Lark text, or a structural tag. `checks` are what the grammar
    does not hold, for `plait.structured.unique`. `refusal` words what the library has against a
    grammar that was not built on the way; `instead` is the route to take then, if there is one.
    """

    backend: Backend
    kind: GrammarKind
    content: Any
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[str, ...] = ()
    any_form: bool = False  # values may be written in other forms than the usual one
    checks: bytes = b""
    refusal: Callable[[str], Exception] | None = field(default=None, compare=False)
    instead: Callable[[], Route] | None = field(default=None, compare=False)


def route(spec: GrammarSpec, *, build: bool = True) -> Route:
    """Choose the backend. Raises the `BadRequest` of what cannot be enforced.

    Without `build`, a whole schema's grammar is left for the compiler to build: once suffices.
    """
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _schema(spec, spec.content, build=build)
        case GrammarKind.JSON_OBJECT:
            return _schema(spec, {"type": "object"}, build=build)
        case GrammarKind.REGEX:
            return _regex(spec)
        case GrammarKind.CHOICE:
            return _choice(spec)
        case GrammarKind.GRAMMAR:
            return _grammar(spec)
        case GrammarKind.STRUCTURAL_TAG:
            from plait.structured import tags

            return tags.route_tag(spec)
        case GrammarKind.OUTLINE:
            from plait.structured import outline

            return outline.route_outline(spec)


# --- schemas ---


def _schema(spec: GrammarSpec, schema: Any, *, build: bool) -> Route:
    found = normalise(schema, spec, whole=True)
    if found.refusals:
        raise refused(found.refusals[0], spec.param)
    return of_written(found, spec, build=build)


def of_written(found: Normalised, spec: GrammarSpec, *, build: bool = True) -> Route:
    """The route of a normalised schema without refusals."""
    spaces = whitespace.read(spec)
    # Items are compared by a reader that knows one spelling of them.
    if found.meaning.any_form and not found.checks:
        route = _in_any_form(found, spec, spaces, build=build)
        if route is not None:
            return route
    return _in_one_form(found, spec, spaces, build=build)


def _in_one_form(
    found: Normalised, spec: GrammarSpec, spaces: whitespace.Whitespace, *, build: bool
) -> Route:
    is_known = xgrammar_version() in prove.PROVEN_XGRAMMAR
    # Checks need strings of one spelling.
    if is_known and not found.checks and spaces.pattern is None and prove.is_proven(found.schema):
        options = whitespace.for_xgrammar(spaces)
        if _xgrammar_reads(found.schema, options):
            return _routed("xgrammar", found, options, ())
    options = whitespace.for_llguidance(spaces)
    return by_llguidance(found, spec, options, spaces.notes, build=build)


def _in_any_form(
    found: Normalised, spec: GrammarSpec, spaces: whitespace.Whitespace, *, build: bool
) -> Route | None:
    """None where no value has another form, or they cannot all be written."""
    from plait.structured import forms

    rules = forms.of(found, whitespace.for_llguidance(spaces), start="start")
    if rules is None:
        return None
    text = "\n".join(rules)
    if build and llguidance_error(text):
        return None
    return Route(
        backend="llguidance",
        kind=GrammarKind.OUTLINE,
        content=text,
        notes=(*found.notes, *spaces.notes),
        any_form=True,
        instead=lambda: _in_one_form(found, spec, spaces, build=False),
    )


def by_llguidance(
    found: Normalised,
    spec: GrammarSpec,
    options: dict[str, Any],
    notes: tuple[str, ...] = (),
    *,
    build: bool = True,
) -> Route:
    """The route to llguidance, if it can build the schema. `options` are its overrides."""
    number = prove.respelled(found.schema)
    if number is not None:
        raise refused(_misspelled(number, found), spec.param)
    text = prove.unwritten(found.schema)
    if text is not None:
        raise refused(_unwritten(text, found), spec.param)

    def refusal(error: str) -> Exception:
        return _llguidance_refusal(error, found, spec)

    if build:
        error = llguidance_error(_llguidance_grammar(found.schema, options))
        if error:
            raise refusal(error)
    return replace(_routed("llguidance", found, options, notes), refusal=refusal)


def _routed(
    backend: Backend, found: Normalised, options: dict[str, Any], notes: tuple[str, ...]
) -> Route:
    return Route(
        backend=backend,
        kind=GrammarKind.JSON_SCHEMA,
        content=found.schema,
        options=MappingProxyType(options),
        notes=(*found.notes, *notes),
        checks=found.checks,
    )


def refused(refusal: Refusal, param: str) -> UnsupportedSchemaKeyword:
    """The error of a refusal."""
    return UnsupportedSchemaKeyword(str(refusal), param=param)


@lru_cache(maxsize=1)
def xgrammar_version() -> str:
    """The installed version, without importing the package."""
    from importlib.metadata import version

    return version("xgrammar")


def _xgrammar_reads(schema: Any, options: dict[str, Any]) -> bool:
    import xgrammar

    try:
        xgrammar.Grammar.from_json_schema(json.dumps(schema), **options)
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=1)
def _byte_tokenizer() -> Any:
    """256 bytes and an end: enough to build a grammar and see whether it can be."""
    import llguidance

    class _Bytes:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([i]) for i in range(256)), b"<end>")
        special_token_ids = (256,)

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def _llguidance_grammar(schema: Any, options: dict[str, Any]) -> str:
    import llguidance

    written = json.dumps(schema)
    return llguidance.LLMatcher.grammar_from_json_schema(written, overrides=cast("Any", options))


def llguidance_error(grammar: str) -> str:
    """Why llguidance cannot build a grammar; empty where it can."""
    import llguidance

    matcher = llguidance.LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    return matcher.get_error() if matcher.is_error() else ""


# What llguidance's messages speak of, and the keywords that may have asked for it.
_SUSPECTS = (
    ("patternPropert", ("patternProperties", "propertyNames")),
    ("multipleOf", ("multipleOf",)),
    ("range", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    ("regex", ("pattern", "format", "patternProperties", "not", "const", "enum")),
    ("", ("pattern", "oneOf", "anyOf", "not")),
)


def _misspelled(number: float, found: Normalised) -> Refusal:
    listings = [each for each in found.keywords if each[1] in ("enum", "const")]
    bounds = [each for each in found.keywords if "imum" in each[1]]  # which meet in one number
    pointer, keyword = next(iter(listings or bounds), ("", "enum"))
    why = f"{number} would come out as another number"
    return Refusal(pointer, keyword, why, "write numbers beyond 53 bits as strings")


def _unwritten(text: str, found: Normalised) -> Refusal:
    pointer, keyword = next((k for k in found.keywords if k[1] in ("enum", "const")), ("", "enum"))
    why = f"{text!r} has a control character that is never written"
    return Refusal(pointer, keyword, why, "leave it out")


def _llguidance_refusal(error: str, found: Normalised, spec: GrammarSpec) -> Exception:
    text = error.split("\n", 1)[0][:160]
    lowered = text.lower()
    if "unsatisfiable" in lowered:
        return InvalidSchema(f"no document fulfils the schema: {text}", param=spec.param)
    suspects = [names for word, names in _SUSPECTS if word.lower() in lowered]
    pointer, keyword = next(
        (each for names in suspects for each in found.keywords if each[1] in names), ("", "schema")
    )
    if any(word in lowered for word in ("too ", "limit", "fuel", "complex")):
        return GrammarTooComplex(
            f"{keyword!r} at {pointer or '/'}: the grammar is too large ({text}); "
            "shorten patterns and repetitions",
            param=spec.param,
        )
    refusal = Refusal(pointer, keyword, f"llguidance says {text!r}", "write it more simply")
    return refused(refusal, spec.param)


# --- regular expressions, choices, grammars ---


def _text(spec: GrammarSpec, error: type[InvalidRegex | InvalidGrammar]) -> str:
    if not isinstance(spec.content, str) or not spec.content:
        raise error("a text that is not empty is needed", param=spec.param)
    if len(spec.content.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise GrammarTooComplex(f"{MAX_TEXT_BYTES:,} bytes are the limit", param=spec.param)
    return spec.content


def _regex(spec: GrammarSpec) -> Route:
    text = _text(spec, InvalidRegex)
    try:
        node = regex.fullmatch(text)
    except regex.RegexError as error:
        message = f"the regular expression has {error}; write it without"
        raise InvalidRegex(message, param=spec.param) from None
    if node == regex.NOTHING:
        raise InvalidRegex("the regular expression matches nothing", param=spec.param)
    pattern = regex.render(node)
    if prove.is_simple(node) and xgrammar_version() in prove.PROVEN_XGRAMMAR:
        return Route(backend="xgrammar", kind=GrammarKind.REGEX, content=pattern)
    import llguidance

    reason = llguidance_error(llguidance.LLMatcher.grammar_from_regex(pattern))
    if reason:
        raise GrammarTooComplex(f"the regular expression: {reason[:300]}", param=spec.param)
    return Route(backend="llguidance", kind=GrammarKind.REGEX, content=pattern)


def _choice(spec: GrammarSpec) -> Route:
    check_choices(spec)
    literals = " | ".join(_literal(each) for each in dict.fromkeys(spec.content))
    return Route(backend="xgrammar", kind=GrammarKind.GRAMMAR, content=f"root ::= {literals}\n")


def check_choices(spec: GrammarSpec) -> None:
    """Raise where the content is no list of choices, or too long."""
    choices = spec.content
    if not isinstance(choices, list) or not choices:
        raise InvalidGrammar("choices are a list of texts", param=spec.param)
    if not all(isinstance(each, str) and each for each in choices):
        raise InvalidGrammar("each choice is a text that is not empty", param=spec.param)
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_TEXT_BYTES:
        raise GrammarTooComplex(
            f"{MAX_CHOICES:,} choices and {MAX_TEXT_BYTES:,} characters are the limit",
            param=spec.param,
        )


def _literal(text: str) -> str:
    """A text as a string of EBNF, all in ASCII."""
    plain = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(plain.get(c) or _escaped(ord(c)) for c in text) + '"'


def _escaped(point: int) -> str:
    if 32 <= point < 127:
        return chr(point)
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


def _grammar(spec: GrammarSpec) -> Route:
    text = _text(spec, InvalidGrammar)
    if "::=" in text:
        return _ebnf(text, spec)
    import llguidance

    from plait.structured.backends.llguidance import names_guidance

    if names_guidance(text):
        raise InvalidGrammar(
            "'x-guidance' could switch enforcement off; leave it out", param=spec.param
        )

    error = llguidance_error(llguidance.LLMatcher.grammar_from_lark(text))
    if error:
        raise InvalidGrammar(
            f"neither EBNF ('root ::= …') nor Lark ('start: …'): {error[:300]}", param=spec.param
        )
    return Route(backend="llguidance", kind=GrammarKind.GRAMMAR, content=text)


def _ebnf(text: str, spec: GrammarSpec) -> Route:
    import xgrammar

    try:
        xgrammar.Grammar.from_ebnf(text)
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0].partition("] ")[2] or str(error)
        raise InvalidGrammar(
            f"the grammar cannot be read: {reason[:300]}", param=spec.param
        ) from None
    return Route(backend="xgrammar", kind=GrammarKind.GRAMMAR, content=text)


# --- explanations ---


@dataclass(frozen=True, slots=True)
class Finding:
    """What becomes of one keyword: the backend that enforces it, or why none does."""

    pointer: str
    keyword: str
    backend: Backend | None
    why: str = ""
    asserts: bool = True  # False: it is an annotation by the schema's draft, or by the request


def explain(spec: GrammarSpec) -> list[Finding]:
    """One finding for each keyword of a schema that asserts something, in its order.

    Raises what `route` raises for a schema that is none, or too large.
    """
    found = normalise(spec.content, spec, whole=True)
    refusals = {refusal.pointer: refusal for refusal in found.refusals}
    doubts = {doubt.keyword: doubt.why for doubt in prove.doubts(found.schema)}
    backend = None if refusals else of_written(found, spec).backend
    findings = []
    for pointer, keyword in found.keywords:
        refusal = refusals.pop(pointer, None)
        if refusal:
            findings.append(Finding(pointer, keyword, None, f"{refusal.why}; {refusal.instead}"))
        elif keyword == "format" and not found.meaning.asserts_formats:
            findings.append(Finding(pointer, keyword, None, "an annotation here", asserts=False))
        else:
            why = f"xgrammar: {doubts[keyword]}" if keyword in doubts else ""
            fallback: Backend = "llguidance" if doubts else "xgrammar"
            findings.append(Finding(pointer, keyword, backend or fallback, why))
    for pointer, refusal in refusals.items():
        findings.append(
            Finding(pointer, refusal.keyword, None, f"{refusal.why}; {refusal.instead}")
        )
    return findings
