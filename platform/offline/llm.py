"""`LLM`: the engine in the caller's process, for batches and scripts."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from plait.adapters.registry import Wish
from plait.platform.bundles import with_defaults
from plait.platform.core import Request, SamplingParams, Speculation
from plait.platform.demo.default import default_adapters, with_default, with_default_draft
from plait.platform.errors import (
    AdapterError,
    BadRequest,
)
from plait.platform.intake import Intake
from plait.platform.offline.adapters import Adapter, LocalAdapters, per_prompt
from plait.platform.offline.options import options_of
from plait.platform.offline.outputs import CompletionDelta, CompletionOutput, RequestOutput
from plait.platform.offline.prompts import (
    Prompt,
    check_messages,
    listed,
    params_per_prompt,
    several_of,
    tokenize,
)
from plait.platform.offline.running import Running
from plait.platform.offline.sight import LocalSight
from plait.platform.offline.structured import (
    ChatPrompt,
    Constraints,
    LocalGrammars,
    chat_prompt,
    each_constraint,
)
from plait.platform.start import start_engine
from plait.vision.early import check_family

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo
    from plait.platform.messages import Stats
    from plait.structured.params import StructuredOutputs
    from plait.structured.spec import GrammarSpec
    from plait.vision.placing import PlacedImages

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model loaded into this process. Threads that call it take turns; their answers share steps.

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
        settings = options_of(model, options)
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
        self._is_closed = False
        self._running = Running(self._engine)
        self._adapters = LocalAdapters(self._engine, self.tokenizer, self._running)
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
        with self._turn():
            return self._adapters.load(wish, source=place, tensors=tensors, config=config).info

    def unload_adapter(self, name: str, *, expected_generation: str | None = None) -> None:
        """Forget a name; answers under way go on. Raises `AdapterNotFound`."""
        with self._turn():
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
        several = several_of(prompts)
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
                params_per_prompt(params, len(several)),
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
        many = listed(messages, "messages")
        if many and isinstance(many[0], Mapping):
            many = [many]
        adapters = per_prompt(adapter, len(many))
        constraints = each_constraint(structured_outputs, len(many))
        with self._turn():
            chats = [
                self._chat_prompt(conversation, one, template, constraint)
                for conversation, one, constraint in zip(many, adapters, constraints, strict=True)
            ]
            asked = [
                self._asked(chat, one, given, speculation)
                for chat, one, given in zip(
                    chats, adapters, params_per_prompt(params, len(many)), strict=True
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
        with self._turn():
            chat = self._chat_prompt(messages, one, template, constraint)
            asked = self._asked(chat, one, params, speculation)
        yield from self._deltas(asked)

    def encode_chat(
        self, messages: Messages, *, adapter: Adapter = None, **template: Any
    ) -> list[int]:
        """Token ids of a conversation, as `chat` would have it answered."""
        with self._turn():
            tokenizer = self._adapters.tokenizer(adapter)
            check_messages(messages)
            seen = self._sight.see(messages)
            chat = chat_prompt(tokenizer, self._sight.shown(tokenizer, seen), template, None)
            return self._sight.encode(tokenizer, chat.text, seen)[0]

    @property
    def stats(self) -> Stats:
        """Gauges and counters of the engine since its start."""
        return self._engine.stats

    def close(self) -> None:
        """Abort what runs, remove copies of adapters; memory goes with the object.

        Nothing can be asked any more: that is a `BadRequest`.
        """
        with self._running.turns:
            self._is_closed = True
            self._running.abort_all()
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

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This thread's turn at what the requests share. Raises `BadRequest` once it is closed."""
        with self._running.turns:
            if self._is_closed:
                raise BadRequest("this LLM is closed: make a new one")
            yield

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
        check_messages(messages)
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
            with self._turn():
                jobs = [self._job(each, held, at=i)[:2] for i, each in enumerate(asked)]
            show = self.config.options.progress if progress is None else progress
            return self._running.run_all(jobs, show=show)

    def _deltas(self, asked: _Asked) -> Iterator[CompletionDelta]:
        with ExitStack() as held:
            with self._turn():
                request, output, spec = self._job(asked, held, at=0)
            param = None if spec is None else spec.param
            yield from self._running.stream(request, output, constraint_param=param)

    def _job(
        self, asked: _Asked, held: ExitStack, *, at: int
    ) -> tuple[Request, RequestOutput, GrammarSpec | None]:
        prompt, params, adapter = asked.prompt, asked.params, asked.adapter
        try:
            chosen = self._adapters.choose(adapter, held)
            tokenizer = self._adapters.tokenizer(adapter)
            text, ids = tokenize(prompt, tokenizer)
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
        output = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            adapter_generations=tuple(one.info.generation for one in chosen),
        )
        return request, output, spec


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
