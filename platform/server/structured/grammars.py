"""The server's compile pool: started behind the first answers, or by who needs it before."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from plait.platform.errors import DeadlineExceeded, Overloaded, Unsupported

if TYPE_CHECKING:
    from plait.platform.core import CompiledGrammar
    from plait.platform.server.adapters.resolve import Target
    from plait.platform.server.client import EngineClient
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.added import Vocabularies
    from plait.structured.pool import CompilePool, PoolStats
    from plait.structured.spec import GrammarSpec
    from plait.structured.vocabulary import Vocabulary

Observe = Callable[[str, float], None]


class Grammars:
    """Compiled grammars for the served model."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, *, observe: Observe) -> None:
        """`observe` is told backend (empty if refused) and seconds of each compile."""
        self._client = client
        self._tokenizer = tokenizer
        self._observe = observe
        self._pool: CompilePool | None = None
        self._vocabularies: Vocabularies | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def compile(
        self, spec: GrammarSpec, *, target: Target, tenant: str, time_left_s: float | None
    ) -> CompiledGrammar:
        """The compiled grammar, for the tokens that `target` has; waits for it while others run.

        Raises the pool's errors, `Unsupported` for a model without an end token,
        `DeadlineExceeded`.
        """
        pool, vocabulary = self._pool, None
        if pool is None:  # reading the vocabulary takes a moment; not on the loop
            pool = await asyncio.to_thread(self._opened, spec.param)
        if target.tokenizer is not self._tokenizer and self._vocabularies is not None:
            vocabulary = await asyncio.to_thread(
                self._vocabularies.of, target.tokenizer, target.vocab_size
            )
        compiling = pool.compile(spec, tenant=tenant, vocabulary=vocabulary)
        try:
            return await asyncio.wait_for(compiling, time_left_s)
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's timeout passed while its grammar was compiled"
            ) from None

    def open_early(self) -> None:
        """Have a worker ready before the first grammar, which would wait two seconds for it.

        Takes as long as reading the vocabulary does; its libraries are loaded beside, niced.
        """
        config = self._client.config
        if config is None or not config.model.eos_token_ids:
            return  # the first request is told why
        with contextlib.suppress(Overloaded):  # the server shuts down
            self._opened("response_format")

    def _opened(self, param: str) -> CompilePool:
        from plait.structured.added import Vocabularies
        from plait.structured.pool import CompilePool

        with self._lock:
            if self._closed:
                raise Overloaded("the server shuts down")
            if self._pool is None:
                self._vocabularies = Vocabularies(self._vocabulary(param))
                self._pool = CompilePool(self._vocabularies.base, observe=self._observe)
                self._pool.start()
            return self._pool

    def _vocabulary(self, param: str) -> Vocabulary:
        from plait.structured.vocabulary import Vocabulary

        config = self._client.config
        if config is None:
            raise Overloaded(self._client.unhealthy_reason or "the engine is starting")
        if not config.model.eos_token_ids:
            raise Unsupported(
                f"{param}: this model has no end token, so a reply whose form is held could not "
                "end; leave it out",
                param=param,
            )
        return Vocabulary.of_model(self._tokenizer, config.model)

    @property
    def stats(self) -> PoolStats | None:
        """The pool's counts; None before there is one."""
        return None if self._pool is None else self._pool.stats

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the compile workers."""
        return [] if self._pool is None else self._pool.worker_pids

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.close()
