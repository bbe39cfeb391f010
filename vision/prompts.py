"""Where a model's images stand in text: what clients may not write, and what templates show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest
from plait.vision.placing import PlacedImages, ProcessedImage, place

if TYPE_CHECKING:
    from plait.platform.config import VisionInfo
    from plait.platform.text.chat_template import ChatTemplate


class ImagePrompts:
    """What a model's prompts with images look like."""

    def __init__(
        self, vision: VisionInfo, *, placeholder: str, embedded: str, begins_behind: str | None
    ) -> None:
        """See the attributes.

        Args:
            vision: Of the model.
            placeholder: What stands for an image in a rendered chat.
            embedded: The text of the token that takes the encoder's rows.
            begins_behind: With what text begins that stands behind its images; None: it may stand
                anywhere.
        """
        self.vision = vision
        self.placeholder = placeholder
        # Texts that a client may not write.
        self.reserved = tuple(dict.fromkeys((placeholder, embedded)))
        self._embedded = embedded
        self._begins_behind = begins_behind

    @property
    def facts(self) -> dict[str, str | None]:
        """What such prompts are made from, but for `vision`."""
        return {
            "placeholder": self.placeholder,
            "embedded": self._embedded,
            "begins_behind": self._begins_behind,
        }

    def check_text(self, content: Any, at: str = "messages") -> None:
        """Refuse text of a client that would be read as an image. Raises `BadRequest`.

        `content` is JSON: a string, or lists and objects of them.
        """
        if isinstance(content, str):
            found = next((name for name in self.reserved if name in content), None)
            if found is not None:
                raise BadRequest(
                    f"{at} holds {found!r}, which stands for an image to this model: send images "
                    "as parts of their own, and write that text in another way",
                    param=at,
                )
        elif isinstance(content, Mapping):
            for key, value in content.items():
                self.check_text(str(key), at)
                self.check_text(value, f"{at}.{str(key)[:64]}")
        elif isinstance(content, list | tuple):
            for number, value in enumerate(content):
                self.check_text(value, f"{at}[{number}]")

    def shown(
        self, messages: Sequence[Mapping[str, Any]], template: ChatTemplate | None
    ) -> Sequence[Mapping[str, Any]]:
        """Messages as `template` can show them: one that reads strings alone gets placeholders."""
        if template is None or template.takes_parts:
            return messages
        place = {"type": "text", "text": self.placeholder}
        return [
            {**message, "content": [place if p.get("type") == "image" else p for p in content]}
            if isinstance(content := message.get("content"), list)
            else message
            for message in messages
        ]

    def encode(
        self, text: str, images: Sequence[ProcessedImage], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], PlacedImages]:
        """Token ids of a rendered chat with its images, and where they are.

        `text` has one placeholder for each. Raises `BadRequest` where it has not.
        """
        self._check_places(text, len(images))
        if not images:
            if self._begins_behind is not None:
                raise BadRequest(
                    "this model answers questions about images: send one with the text",
                    param="messages",
                )
            ids = encode(text)
            return ids, place(ids, (), self.vision)
        pieces = text.split(self.placeholder)
        if self._begins_behind is not None:
            pieces[-1] = f"{self._begins_behind}{pieces[-1]}\n"
        parts = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            parts += (image.text, piece)
        ids = encode("".join(parts))
        return ids, place(ids, images, self.vision)

    def _check_places(self, text: str, num_images: int) -> None:
        num_places = text.count(self.placeholder)
        if num_places != num_images:
            raise BadRequest(
                f"the chat template wrote {num_places} places ({self.placeholder}) for "
                f"{num_images} images: it must write one for each, and text must not hold any",
                param="messages",
            )
        if self._embedded != self.placeholder and self._embedded in text:
            raise BadRequest(
                f"the prompt holds {self._embedded}, which stands for an image to this model",
                param="messages",
            )
