"""Images in the conversations of the offline `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.vision.limits import ImageLimits
from plait.vision.parts import TURNED_OFF, PartReader, take_images, takes_images

if TYPE_CHECKING:
    from plait.platform.config import EngineConfig
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.placing import PlacedImages, ProcessedImage
    from plait.vision.preparation import ImagePreparation


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A conversation as templates take it, and its images, processed."""

    messages: Sequence[Mapping[str, Any]]
    images: tuple[ProcessedImage, ...] = ()


class LocalSight:
    """Reads images for one model. Raises `ModelUnsupported` where it cannot for this one."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._processor = None
        self._preparation: ImagePreparation | None = None
        if takes_images(config.model, config.options):
            from plait.vision.later import processor_of

            self._processor = processor_of(config.model, config.options, tokenizer)

    def see(self, messages: Sequence[Mapping[str, Any]]) -> Seen:
        """Read, decode and process what images a conversation has.

        Raises `BadRequest` that names the part at fault.
        """
        reader = PartReader(
            model=self._config.model.name,
            takes_images=self._processor is not None,
            max_images=ImageLimits().num_images,
            is_local=True,
        )
        if self._config.model.vision is not None:
            reader.why = TURNED_OFF
        read = take_images(messages, reader)
        if self._processor is None:
            return Seen(messages=read)
        self._processor.check_text(read)
        if not reader.images:
            return Seen(messages=read)
        if self._preparation is None:
            from plait.vision.preparation import ImagePreparation

            self._preparation = ImagePreparation()
        images = self._preparation.prepare_blocking(reader.images)
        self._processor.check_room(images, self._config.scheduler.max_model_len - 1)
        at = [part.at for part in reader.images]
        return Seen(messages=read, images=tuple(self._processor.process_blocking(images, at=at)))

    def shown(self, tokenizer: Tokenizer, seen: Seen) -> Sequence[Mapping[str, Any]]:
        """The messages as the tokenizer's template can show them."""
        if self._processor is None or not seen.images:
            return seen.messages
        return self._processor.shown(seen.messages, tokenizer.chat_template_for())

    def encode(
        self, tokenizer: Tokenizer, text: str, seen: Seen | None
    ) -> tuple[list[int], PlacedImages | None]:
        """Token ids of the rendered conversation, and where its images are in them."""
        if self._processor is None:
            return tokenizer.encode(text, add_special_tokens=False), None
        images = () if seen is None else seen.images
        return self._processor.encode(
            text, images, lambda whole: tokenizer.encode(whole, add_special_tokens=False)
        )

    def close(self) -> None:
        """End the threads."""
        if self._processor is not None:
            self._processor.close()
        if self._preparation is not None:
            self._preparation.close()
