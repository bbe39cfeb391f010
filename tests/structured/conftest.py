"""A pool of compilers for the tests of a file."""

import pytest
from support.compiling import MARGIN_S
from support.grammars import vocabulary

from plait.structured.pool import CompilePool, PoolSettings


@pytest.fixture(scope="module")
def pool():
    pool = CompilePool(vocabulary(), PoolSettings(wall_limit_s=MARGIN_S))
    yield pool
    pool.close()
