"""Grammars routed and run on a vocabulary of bytes: what a schema's masks let through."""

import json
from functools import lru_cache

from plait.structured.router import Route, route
from plait.structured.spec import GrammarKind, GrammarSpec

END = 256
BYTES = [*(bytes([i]) for i in range(256)), b"<end>"]


def compact(value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


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


def acceptor(found: Route):
    return (XgrammarText if found.backend == "xgrammar" else LlguidanceText)(found)


def accepts(schema, value, **fields) -> bool:
    """Whether the routed grammar of a schema lets a value through, written compactly."""
    return acceptor(route(schema_spec(schema, **fields))).accepts(compact(value))
