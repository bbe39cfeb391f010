"""`LLM`: the engine in the caller's process, for batches and scripts."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import operator
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_type_hints

from plait.adapters.registry import Wish
from plait.platform.bundles import with_defaults
from plait.platform.config import Options
from plait.platform.core import Request, SamplingParams, Speculation
from plait.platform.demo.default import default_adapters, with_default, with_default_draft
from plait.platform.errors import (
    AdapterError,
    BadRequest,
    ConfigError,
    InternalError,
    PlaitError,
    by_code,
)
from plait.platform.intake import Intake
from plait.platform.llm_adapters import Adapter, LocalAdapters, per_prompt
from plait.platform.llm_sight import LocalSight
from plait.platform.llm_structured import (
    ChatPrompt,
    Constraints,
    LocalGrammars,
    chat_prompt,
    each_constraint,
)
from plait.platform.outputs import CompletionDelta, CompletionOutput, RequestOutput
from plait.platform.start import start_engine
from plait.vision.early import check_family

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo
    from plait.platform.messages import Stats
    from plait.platform.tokenizer import Tokenizer
    from plait.structured.params import StructuredOutputs
    from plait.structured.spec import GrammarSpec
    from plait.vision.placing import PlacedImages

# Iterables of numpy's or torch's integers, and generators, do as well as lists.
Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt_token_ids": …}
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model loaded into this process. Not thread-safe.

    `model` is a directory, a GGUF file or a hub id; None is the embedded SmolLM2 with its vision
    tower, adapters and draft head. Further options are those of `plait serve`
    (`plait.platform.config.Options`). `adapters` maps names to directories or hub ids of LoRA
    adapters; an empty one leaves out those of the embedded model. Raises `ConfigError` or
    `ModelUnsupported` with the exact cause, `AdapterError` where an adapter does not fit.

        llm = LLM()
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        **options: Any,
    ) -> None:
        settings = _options(model, options)
        if settings.model is None:
            if adapters is None:
                adapters = default_adapters(settings)
            settings = with_default(with_default_draft(settings))
        check_family(settings)
        started = start_engine(settings)
        self.config = started.engine.config
        self.tokenizer = started.tokenizer
        self._engine = started.engine
        self._intake = Intake(self.config, self.tokenizer)
        self._sight = LocalSight(self.config, self.tokenizer)
        self._grammars = LocalGrammars(self.tokenizer, self.config.model)
        self._ids = itertools.count()
        self._running: dict[str, _Job] = {}
        self._adapters = LocalAdapters(self._engine, self.tokenizer, self._step)
        for name, source in (adapters or {}).items():
            self.load_adapter(name, source)

    # --- adapters ---

    def load_adapter(  # noqa: PLR0913 (a public call, all by name)
        self,
        name: str,
        source: str | os.PathLike[str] | None = None,
        *,
        tensors: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        replace: bool = False,
        expected_generation: str | None = None,
        pinned: bool = False,
        allow_zero_delta: bool = False,
    ) -> AdapterInfo:
        """Load a LoRA adapter under a name: a directory, a hub id, or torch tensors with a config.

        `tensors` and `config` are what PEFT would save. With `replace` the name may be taken, with
        `expected_generation` by this generation only; answers under way stay with the old one.
        `pinned` keeps it on the device. Raises the `AdapterError` that says what is wrong; then
        nothing has changed.
        """
        wish = Wish(
            name=name,
            replace=replace,
            expected_generation=expected_generation,
            pinned=pinned,
            allow_zero_delta=allow_zero_delta,
        )
        place = None if source is None else os.fspath(source)
        return self._adapters.load(wish, source=place, tensors=tensors, config=config).info

    def unload_adapter(self, name: str, *, expected_generation: str | None = None) -> None:
        """Forget a name; answers under way go on. Raises `AdapterNotFound`."""
        self._adapters.unload(name, expected_generation)

    def list_adapters(self) -> dict[str, AdapterInfo]:
        """What is loaded, by name."""
        return {named.name: named.info for named in self._adapters.entries()}

    # --- answers ---

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter] = None,
        structured_outputs: Constraints = None,
        speculation: Speculation | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, in the order given.

        `params` is one for all or one per prompt, and so are `structured_outputs`, which answers
        must obey, and `adapter`: a name, or a list of (name, scale) whose changes add up.
        `speculation` says whether and how far to draft ahead, which changes no token. Every
        prompt is checked before the first is computed: `BadRequest` names the one that cannot be
        served. A request that fails later has `finish_reason` "error" and `error` on its outputs;
        the others are not touched.
        """
        several = _several(prompts)
        asked = [
            _Asked(
                prompt=prompt,
                params=one,
                adapter=adapter,
                spec=None if constraint is None else constraint.spec(),
                speculation=speculation,
            )
            for prompt, one, adapter, constraint in zip(
                several,
                _per_prompt(params, len(several)),
                per_prompt(adapter, len(several)),
                each_constraint(structured_outputs, len(several)),
                strict=True,
            )
        ]
        return self._answer(asked, progress=progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter | Sequence[Adapter] = None,
        structured_outputs: Constraints = None,
        speculation: Speculation | None = None,
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's or its adapter's chat template.

        With `tools` (and `tool_choice`, `parallel_tool_calls`, all as OpenAI has them) answers
        have `tool_calls`. The rest of `template` goes to the template: `add_generation_prompt`,
        `continue_final_message`, `template_kwargs`.
        """
        many = _listed(messages, "messages")
        if many and isinstance(many[0], Mapping):
            many = [many]
        adapters = per_prompt(adapter, len(many))
        constraints = each_constraint(structured_outputs, len(many))
        chats = [
            self._chat_prompt(conversation, one, template, constraint)
            for conversation, one, constraint in zip(many, adapters, constraints, strict=True)
        ]
        asked = [
            self._asked(chat, one, given, speculation)
            for chat, one, given in zip(
                chats, adapters, _per_prompt(params, len(many)), strict=True
            )
        ]
        outputs = self._answer(asked, progress=progress)
        for chat, output in zip(chats, outputs, strict=True):
            for answer in output.outputs:
                chat.read(answer)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: Adapter = None,
        structured_outputs: StructuredOutputs | None = None,
        speculation: Speculation | None = None,
    ) -> Iterator[CompletionDelta]:
        """Answer one prompt, handing out what each step adds.

        Leaving the loop early aborts what is unfinished. Raises `PlaitError` where the request
        fails on the way.
        """
        (one,) = per_prompt(adapter, 1)
        (constraint,) = each_constraint(structured_outputs, 1)
        spec = None if constraint is None else constraint.spec()
        asked = _Asked(
            prompt=prompt, params=params, adapter=one, spec=spec, speculation=speculation
        )
        yield from self._deltas(asked)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        adapter: Adapter = None,
        structured_outputs: StructuredOutputs | None = None,
        speculation: Speculation | None = None,
        **template: Any,
    ) -> Iterator[CompletionDelta]:
        """`stream` for one conversation; calls come as text, in the model's own markup."""
        (one,) = per_prompt(adapter, 1)
        (constraint,) = each_constraint(structured_outputs, 1)
        chat = self._chat_prompt(messages, one, template, constraint)
        yield from self._deltas(self._asked(chat, one, params, speculation))

    def encode_chat(
        self, messages: Messages, *, adapter: Adapter = None, **template: Any
    ) -> list[int]:
        """Token ids of a conversation, as `chat` would have it answered."""
        tokenizer = self._adapters.tokenizer(adapter)
        seen = self._sight.see(messages)
        chat = chat_prompt(tokenizer, self._sight.shown(tokenizer, seen), template, None)
        return self._sight.encode(tokenizer, chat.text, seen)[0]

    @property
    def stats(self) -> Stats:
        """Gauges and counters of the engine since its start."""
        return self._engine.stats

    def close(self) -> None:
        """Abort what runs, remove copies of adapters; memory goes with the object."""
        self._abort(list(self._running))
        self._adapters.close()
        self._grammars.close()
        self._sight.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- requests ---

    def _chat_prompt(
        self,
        messages: Messages,
        adapter: Adapter,
        template: Mapping[str, Any],
        constraint: StructuredOutputs | None,
    ) -> ChatPrompt:
        tokenizer = self._adapters.tokenizer(adapter)
        spec = None if constraint is None else constraint.spec()
        if spec is None and not template.get("tools"):
            spec = self._adapters.constraint(adapter)
        seen = self._sight.see(messages)
        chat = chat_prompt(tokenizer, self._sight.shown(tokenizer, seen), template, spec)
        return dataclasses.replace(chat, seen=seen)

    def _asked(
        self,
        chat: ChatPrompt,
        adapter: Adapter,
        params: SamplingParams | None,
        speculation: Speculation | None,
    ) -> _Asked:
        tokenizer = self._adapters.tokenizer(adapter)
        ids, images = self._sight.encode(tokenizer, chat.text, chat.seen)
        return _Asked(
            prompt={"prompt": chat.text, "prompt_token_ids": ids},
            images=images,
            params=params,
            adapter=adapter,
            spec=chat.spec,
            speculation=speculation,
            chat=chat,
        )

    def _answer(self, asked: list[_Asked], *, progress: bool | None) -> list[RequestOutput]:
        with ExitStack() as held:
            jobs = [self._job(each, held, at=i) for i, each in enumerate(asked)]
            return self._run_all(jobs, progress=progress)

    def _deltas(self, asked: _Asked) -> Iterator[CompletionDelta]:
        with ExitStack() as held:
            request, output = self._job(asked, held, at=0)
            yield from self._stream(request, output)

    def _job(self, asked: _Asked, held: ExitStack, *, at: int) -> tuple[Request, RequestOutput]:
        prompt, params, adapter = asked.prompt, asked.params, asked.adapter
        try:
            chosen = self._adapters.choose(adapter, held)
            tokenizer = self._adapters.tokenizer(adapter)
            text, ids = _tokenize(prompt, tokenizer)
            if params is None:
                params = with_defaults(SamplingParams(), self._adapters.bundle(adapter))
            if asked.chat is not None:
                params = asked.chat.params(params)
            spec, grammar = asked.spec, None
            if spec is None and asked.chat is None:
                spec = self._adapters.constraint(adapter)
            if spec is not None:
                width = max((one.info.vocab_size or 0 for one in chosen), default=0)
                grammar = self._grammars.compile(spec, tokenizer, width)
            request = self._intake.request(
                request_id=f"llm-{next(self._ids)}",
                prompt_token_ids=ids,
                params=params,
                adapters=[(one.info, one.scale) for one in chosen],
                tokenizer=tokenizer,
                grammar=grammar,
                speculation=asked.speculation,
                images=asked.images,
            )
        except (BadRequest, AdapterError) as error:
            raise type(error)(f"prompt {at}: {error.message}", param=error.param) from None
        outputs = [
            CompletionOutput(index=i, logprobs=None if params.logprobs is None else [])
            for i in range(params.n)
        ]
        return request, RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            adapter_generations=tuple(one.info.generation for one in chosen),
        )

    # --- running ---

    def _run_all(
        self, jobs: list[tuple[Request, RequestOutput]], *, progress: bool | None
    ) -> list[RequestOutput]:
        show = self.config.options.progress if progress is None else progress
        try:
            with _Bar(sum(r.params.n for r, _ in jobs), show) as bar:
                waiting = deque(_Job(request=r, output=o, listen=bar.event) for r, o in jobs)
                while waiting or any(not output.finished for _, output in jobs):
                    while waiting and self._engine.has_room:
                        self._add(waiting.popleft())
                    self._step()
        finally:
            self._abort([request.request_id for request, _ in jobs])
        return [output for _, output in jobs]

    def _stream(self, request: Request, output: RequestOutput) -> Iterator[CompletionDelta]:
        deltas: deque[CompletionDelta] = deque()
        job = _Job(request=request, output=output, listen=deltas.append)
        while not self._engine.has_room:
            self._step()
        self._add(job)
        try:
            while deltas or not output.finished:
                if not deltas:
                    self._step()
                    continue
                delta = deltas.popleft()
                if delta.error is not None:
                    raise job.error or InternalError(delta.error)
                yield delta
        finally:
            self._abort([request.request_id])

    def _add(self, job: _Job) -> None:
        self._engine.add(job.request)
        self._running[job.request.request_id] = job

    def _step(self) -> None:
        """One step for everything that runs, whoever waits for it."""
        for event in self._engine.step():
            job = self._running.get(event.request_id)
            if job is None:
                continue
            if event.error is not None:
                job.error = by_code(event.error[0])(event.error[1])
            job.listen(job.output.apply(event))
            if job.output.finished:
                del self._running[event.request_id]

    def _abort(self, request_ids: Sequence[str]) -> None:
        """End those of `request_ids` that still run, and give back what they held."""
        left = [request_id for request_id in request_ids if request_id in self._running]
        for request_id in left:
            self._engine.abort(request_id)
            del self._running[request_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One prompt with all that was said about its answer."""

    prompt: Prompt
    params: SamplingParams | None
    adapter: Adapter
    spec: GrammarSpec | None
    speculation: Speculation | None
    chat: ChatPrompt | None = None
    images: PlacedImages | None = None


@dataclass(slots=True, kw_only=True)
class _Job:
    """A request in the engine, and who listens to it."""

    request: Request
    output: RequestOutput
    listen: Callable[[CompletionDelta], None]
    error: PlaitError | None = None


class _Bar:
    """The progress bar of a batch: answers done, tokens a second."""

    def __init__(self, total: int, show: bool) -> None:
        self._show = show and total > 1 and sys.stderr.isatty()
        self._total = total
        self._num_tokens = 0
        self._began = time.monotonic()

    def __enter__(self) -> _Bar:
        if self._show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("answers"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.0f} tok/s"),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task("answers", total=self._total, rate=0.0)
        return self

    def event(self, delta: CompletionDelta) -> None:
        self._num_tokens += len(delta.token_ids)
        if self._show:
            self._progress.update(
                self._task,
                advance=delta.finish_reason is not None,
                rate=self._num_tokens / max(time.monotonic() - self._began, 1e-9),
            )

    def __exit__(self, *_: object) -> None:
        if self._show:
            self._progress.stop()


def _options(model: str | os.PathLike[str] | None, fields: dict[str, Any]) -> Options:
    known = [f.name for f in dataclasses.fields(Options)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"LLM has no option {name}{hint}", param=name)
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    options = Options(model=model, **fields)
    for name, kind in get_type_hints(Options).items():
        value = getattr(options, name)
        if not isinstance(value, kind | int if kind is float else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise ConfigError(
                f"{name} cannot be {value!r}: it takes {getattr(kind, '__name__', kind)}",
                param=name,
            )
    return options


def _tokenize(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, Sequence[int]]:
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise BadRequest(
                f"a prompt mapping takes prompt and prompt_token_ids, not {sorted(unknown)}",
                param="prompt",
            )
        text = prompt.get("prompt")
        given = prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise _not_a_prompt()
        if given is None:
            return text, tokenizer.encode(text or "")
    else:
        text, given = None, prompt
    ids = _token_ids(given)
    if ids is None:
        raise _not_a_prompt()
    return text, ids


def _not_a_prompt() -> BadRequest:
    return BadRequest(
        "a prompt is text, a list of token ids, or a mapping with prompt or prompt_token_ids",
        param="prompt",
    )


def _listed(values: Any, name: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise BadRequest(f"{name} must be a list, got {type(values).__name__}", param=name)
    return list(values)


def _token_ids(prompt: object) -> list[int] | None:
    """The ids, where `prompt` is a flat run of integers of any kind; else None."""
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        return None
    ids: list[int] = []
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            return None
        try:
            ids.append(operator.index(token))
        except TypeError:  # an array of several
            return None
    return ids


def _several(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A flat list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = _listed(prompts, "prompts")
    ids = _token_ids(several)
    return [ids] if ids else several


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    params = _listed(params, "params")
    if any(not isinstance(one, SamplingParams) for one in params):
        raise BadRequest("params are SamplingParams, one for all or one each", param="params")
    if len(params) != count:
        raise BadRequest(
            f"{len(params)} sampling parameters for {count} prompts: give one for all, or one each",
            param="params",
        )
    return params
