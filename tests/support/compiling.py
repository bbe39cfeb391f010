"""What tests of compiling grammars in processes share."""

from plait.platform.errors import PlaitError
from plait.structured.pool import CompilePool
from plait.structured.spec import CompiledGrammar, GrammarSpec

# A busy machine is slow; what must end does so long before a test would be given up.
MARGIN_S = 20


def outcome(pool: CompilePool, spec: GrammarSpec) -> CompiledGrammar | PlaitError:
    try:
        return pool.compile_blocking(spec)
    except PlaitError as error:
        return error
