"""The images of one chat on their way: fetched, decoded, processed, and put into its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest
from plait.platform.server.prompts import check_chat

if TYPE_CHECKING:
    from plait.platform.server.context import ServerContext
    from plait.platform.server.schemas import ChatTemplating
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.later import ServedProcessor
    from plait.vision.parts import ImagePart
    from plait.vision.placing import PlacedImages, ProcessedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatImages:
    """One chat's images; `see` comes before `encode`, and `held` is closed in the end."""

    context: ServerContext
    messages: list[dict[str, Any]]  # as templates take them
    parts: Sequence[ImagePart]
    seen: list[ProcessedImage] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)  # closed when the request has ended

    @classmethod
    def of(cls, context: ServerContext, body: ChatTemplating) -> ChatImages:
        """Read a chat's messages.

        Raises `BadRequest`, and `Unsupported` where there is nothing to process images.
        """
        reader = context.part_reader()
        with context.metrics.images.reading():
            messages = check_chat(body, reader)
        if context.processor is None:
            reader.refuse_images()
        return cls(context=context, messages=messages, parts=tuple(reader.images))

    async def see(
        self, room: int, salt: str, time_left_s: Callable[[], float | None] | None = None
    ) -> None:
        """Fetch, decode and process them; a prompt may have `room` tokens.

        `salt`: who may find what is kept of them, as with blocks of KV.

        Raises `BadRequest` that names the image or the text at fault, `ContextLengthExceeded`
        before anything is processed, and what `time_left_s` raises past the deadline.
        """
        processor = self.context.processor
        if processor is None:
            return
        await self.context.in_pool(processor.check_text, self.messages)
        if not self.parts:
            return
        try:
            with self.context.metrics.images.preparing(len(self.parts)):
                async with asyncio.timeout(time_left_s() if time_left_s else None):
                    await self._prepare(processor, room, salt)
        except TimeoutError:
            if time_left_s is not None:
                time_left_s()
            raise

    async def _prepare(self, processor: ServedProcessor, room: int, salt: str) -> None:
        images = await self.context.images.prepare(self.parts)
        sizes = await self.context.in_pool(processor.check_room, images, room)
        wanted = {f"{salt}\0{key}": num_bytes for key, num_bytes in sizes.items()}
        self.held.callback((await self.context.held_images.hold(wanted)).release)
        self.seen.extend(await processor.process(images, salt, at=[part.at for part in self.parts]))

    def shown(self, tokenizer: Tokenizer, *, with_tools: bool = False) -> list[dict[str, Any]]:
        """The messages as the tokenizer's template can show them."""
        processor = self.context.processor
        if processor is None or not self.parts:
            return list(self.messages)
        template = tokenizer.chat_template_for(with_tools=with_tools)
        return [dict(message) for message in processor.shown(self.messages, template)]

    def encode(
        self, tokenizer: Tokenizer, text: str, body: ChatTemplating
    ) -> tuple[list[int], PlacedImages | None]:
        """Token ids of the rendered chat, and where its images are in them; once."""
        special = body.add_special_tokens
        processor = self.context.processor
        if processor is None:
            return tokenizer.encode(text, add_special_tokens=special), None
        found = processor.encode(
            text, self.seen, lambda whole: tokenizer.encode(whole, add_special_tokens=special)
        )
        self.seen.clear()  # the request has them now, until it is sent
        return found

    def refuse_truncation(self, keep: int | None) -> None:
        """A prompt that has images cannot lose its beginning. Raises `BadRequest`."""
        if keep is not None and self.parts:
            raise BadRequest(
                "truncate_prompt_tokens could cut an image: leave it out where there are any",
                param="truncate_prompt_tokens",
            )
