"""Grammars routed and run on a vocabulary of bytes: what a schema's masks let through."""

import json
from functools import lru_cache

from plait.structured.router import Route, route
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.unique import Uniqueness

END = 256
BYTES = [*(bytes([i]) for i in range(256)), b"<end>"]


def compact(value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def closed(properties, required=None, **more):
    """An object of these properties, all required if not said otherwise, and no others."""
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
        **more,
    }


def schema_spec(schema, **fields) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=schema, **fields)


@lru_cache(maxsize=1)
def _xgrammar():
    import xgrammar

    info = xgrammar.TokenizerInfo(
        BYTES, vocab_type=xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[END]
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


@lru_cache(maxsize=1)
def _llguidance():
    import llguidance

    class Bytes:
        eos_token_id = END
        bos_token_id = None
        tokens = BYTES
        special_token_ids = (END,)

        def __call__(self, text):
            return list(text.encode() if isinstance(text, str) else text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


class XgrammarText:
    """Which whole texts a route to xgrammar accepts."""

    def __init__(self, found: Route) -> None:
        compiler = _xgrammar()
        match found.kind:
            case GrammarKind.JSON_SCHEMA:
                self._grammar = compiler.compile_json_schema(
                    json.dumps(found.content), **found.options
                )
            case GrammarKind.REGEX:
                self._grammar = compiler.compile_regex(found.content)
            case GrammarKind.GRAMMAR:
                self._grammar = compiler.compile_grammar(found.content)
            case GrammarKind.STRUCTURAL_TAG:
                self._grammar = compiler.compile_structural_tag(found.content)

    def accepts(self, text: str | bytes) -> bool:
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._grammar)
        data = text.encode() if isinstance(text, str) else text
        return all(matcher.accept_token(byte) for byte in data) and matcher.is_completed()


class LlguidanceText:
    """Which whole texts a route to llguidance accepts."""

    def __init__(self, found: Route) -> None:
        from llguidance import LLMatcher

        match found.kind:
            case GrammarKind.JSON_SCHEMA:
                text = json.dumps(found.content)
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=dict(found.options))
            case GrammarKind.REGEX:
                grammar = LLMatcher.grammar_from_regex(found.content)
            case _:
                grammar = LLMatcher.grammar_from_lark(found.content)
        self._matcher = LLMatcher(_llguidance(), grammar, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def accepts(self, text: str | bytes) -> bool:
        data = text.encode() if isinstance(text, str) else text
        matcher = self._matcher.deep_copy()
        taken = matcher.try_consume_tokens(list(data))
        return taken == len(data) and matcher.is_accepting()


class UniqueText:
    """A grammar's texts, but for those that are vetoed."""

    def __init__(self, found: Route, inner) -> None:
        self._checks, self._inner = found.checks, inner

    def accepts(self, text: str | bytes) -> bool:
        if not self._inner.accepts(text):
            return False
        data = text.encode() if isinstance(text, str) else text
        return Uniqueness(self._checks).accept(data)


def acceptor(found: Route):
    inner = (XgrammarText if found.backend == "xgrammar" else LlguidanceText)(found)
    return UniqueText(found, inner) if found.checks else inner


def accepts(schema, value, **fields) -> bool:
    """Whether the routed grammar of a schema lets a value through, written compactly."""
    return acceptor(route(schema_spec(schema, **fields))).accepts(compact(value))


# --- documents ---


def sample(schema, random, defs=None, depth=0):
    """A random document of a written schema, or nearly: what it is not, a judge tells."""
    defs = schema.get("$defs", {}) if defs is None and isinstance(schema, dict) else defs
    if isinstance(schema, bool) or not schema.keys() - {"$defs"}:
        return random.choice([None, True, 0, 2.5, "x", [], {}])
    if "$ref" in schema:
        return sample(defs[schema["$ref"].rpartition("/")[2]], random, defs, depth + 1)
    if "anyOf" in schema:
        return sample(random.choice(schema["anyOf"]), random, defs, depth + 1)
    if "enum" in schema:
        return random.choice(schema["enum"])
    kind = schema.get("type")
    kind = random.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        return _sample_object(schema, random, defs, depth)
    if kind == "array":
        return _sample_array(schema, random, defs, depth)
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", schema.get("maximum", 3) - 3))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 6))
        step = schema.get("multipleOf", 1)
        value = random.choice([low, high, low + 1, (low + high) / 2, low // step * step + step])
        return int(value) if kind == "integer" else value
    if kind == "string":
        few = schema.get("minLength", 0)
        many = schema.get("maxLength", few + 3)
        text = random.choice(
            ["", "a", "abc", "1", "2020-01-01", "a@b.co", "http://a.b/c", 'é"\\\n']
        )
        return (text + "x" * few)[: max(few, min(len(text), many))]
    return None if kind == "null" else random.random() < 0.5


def _sample_object(schema, random, defs, depth):
    found = {}
    required = schema.get("required", [])
    for name, inner in schema.get("properties", {}).items():
        chance = 0.5 if depth < 4 else 0.1
        wanted = name in required or random.random() < chance
        if inner is not False and wanted and depth < 12:
            found[name] = sample(inner, random, defs, depth + 1)
    if schema.get("additionalProperties", True) is not False and random.random() < 0.4:
        found[random.choice(["x", "zz", "a b"])] = sample(
            schema.get("additionalProperties", {}), random, defs, depth + 1
        )
    return found


def _sample_array(schema, random, defs, depth):
    low = schema.get("minItems", 0)
    length = random.randint(low, min(schema.get("maxItems", low + 2), low + 3))
    prefix = schema.get("prefixItems", [])
    kinds = (prefix + [schema.get("items", {})] * length)[:length]
    if depth > 6:
        kinds = kinds[:low]
    return [sample(kind, random, defs, depth + 1) for kind in kinds if kind is not False]


def mutate(value, random):
    """A document like another, wrong or right by chance, with its keys in their order."""
    if isinstance(value, dict) and value and random.random() < 0.7:
        name = random.choice(list(value))
        if random.random() < 0.25:
            return {k: v for k, v in value.items() if k != name}
        return {k: mutate(v, random) if k == name else v for k, v in value.items()}
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        if random.random() < 0.3:
            return [*value, random.choice(value)]
        return [mutate(v, random) if i == at else v for i, v in enumerate(value)]
    if isinstance(value, dict) and random.random() < 0.4:
        return {**value, random.choice(["x", "new", "a"]): random.choice([1, "a", None])}
    if isinstance(value, str) and random.random() < 0.6:
        return random.choice([value + "x", value[:-1], value.upper(), ""])
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.6:
        return random.choice([value + 1, value - 1, -value, value + 0.5, value * 1000])
    return random.choice([None, True, False, 0, -1, 1, 0.5, "", "a", [], [1], {}, {"a": 1}])
