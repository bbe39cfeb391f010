"""Our engine, stepped in this process, as a runner of the throughput benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from plait.platform.bench.timing import StepClock, Timing
from plait.platform.core import FinishReason, Request, SamplingParams, Speculation
from plait.platform.errors import InternalError

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo
    from plait.platform.engine import Engine
    from plait.platform.intake import Intake
    from plait.platform.metered import Total


class EngineRunner:
    """Steps an engine until a batch is answered. Nothing of an earlier batch is reused."""

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        *,
        name: str = "plait",
        adapters: Sequence[AdapterInfo] = (),
        speculation: Speculation | None = None,
        temperature: float = 0.0,
    ) -> None:
        """With `adapters`, each request uses the next of them."""
        self.name = name
        self._engine = engine
        self._intake = intake
        self._adapters = adapters
        self._speculation = speculation or Speculation()
        self._temperature = temperature
        self._num_runs = 0

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Timing:
        """Exactly `output_tokens` each."""
        requests = self._requests(prompts, output_tokens)
        clock = StepClock(len(prompts), sum(map(len, prompts)), time.perf_counter())
        for tokens in self._answer(requests):
            now_s = time.perf_counter()
            for index, ids in tokens:
                clock.tokens(index, len(ids), now_s)
        return clock.timing()

    def token_times(self, prompt: Sequence[int], output_tokens: int) -> list[float]:
        """Moments (perf_counter) of every token of one answer."""
        times: list[float] = []
        for tokens in self.steps([prompt], output_tokens):
            now_s = time.perf_counter()
            times += [now_s for _, ids in tokens for _ in ids]
        return times

    def steps(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> Iterator[list[tuple[int, list[int]]]]:
        """(prompt's number, token ids) that each step gives, while it is newest."""
        return self._answer(self._requests(prompts, output_tokens))

    def phases(self) -> dict[str, Total]:
        """What parts of the engine's steps took until now."""
        return self._engine.phases()

    def _requests(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Request]:
        self._num_runs += 1
        params = SamplingParams(
            temperature=self._temperature, seed=0, max_tokens=output_tokens, ignore_eos=True
        )
        return [
            self._intake.request(
                request_id=f"{self.name}-{self._num_runs}-{index}",
                prompt_token_ids=prompt,
                params=params,
                cache_salt=f"{self.name} {self._num_runs}",  # no block of another run matches
                adapters=self._adapter(index),
                speculation=self._speculation,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _adapter(self, index: int) -> list[tuple[AdapterInfo, float]]:
        found = self._adapters
        return [(found[index % len(found)], 1.0)] if found else []

    def _answer(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, list[int]]]]:
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        for request in requests:
            self._engine.add(request)
        while self._engine.has_unfinished:
            events = self._engine.step()
            for event in events:
                if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise InternalError(f"a measured request ended early: {event.error}")
            yield [(numbers[event.request_id], list(event.token_ids)) for event in events]
