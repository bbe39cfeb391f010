"""Images in the content of chat messages: found, checked in form, and numbered.

The messages that come out hold `{"type": "image"}` where an image stands, as chat templates of
vision-language models read it; the images follow apart, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest, ImageTooLarge, Unsupported

if TYPE_CHECKING:
    from plait.platform.config import ModelInfo, Options
    from plait.vision.sources import ImageSource

# How large an image is shown to the model; see `plait.vision.shrink`.
DETAILS = ("auto", "high", "low")
_PART_KEYS = frozenset({"type", "image_url", "uuid"})  # uuid: vLLM's; never trusted, so not read
_URL_KEYS = frozenset({"url", "detail"})
_LOCAL_KINDS = ("image", "image_pil")
# Types of parts that other servers know. All but images are refused by name.
MEDIA_PARTS = frozenset(
    {
        "audio_url",
        "file",
        "image",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "video",
        "video_url",
    }
)

TURNED_OFF = "it was started with --encoder-cache-memory 0 and serves text only"


def takes_images(model: ModelInfo, options: Options) -> bool:
    """Whether a model can see, and is let to."""
    return model.vision is not None and options.encoder_cache_bytes != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """One image of a conversation. `at` is where it stands, for errors."""

    at: str
    source: ImageSource
    detail: str = "auto"


@dataclass(slots=True, kw_only=True)
class PartReader:
    """Takes the images out of one conversation.

    `model` is the model's name, `takes_images` whether it can see; one that cannot refuses.
    `is_local`: the caller is in this process, so files and pixels are taken beside URLs.
    """

    model: str
    takes_images: bool
    max_images: int
    is_local: bool = False
    why: str = "it reads text only"  # where the model takes no images
    images: list[ImagePart] = field(default_factory=list)

    def read(self, part: Mapping[str, Any], at: str, role: Any = "user") -> dict[str, Any]:
        """A part of one of `MEDIA_PARTS` as templates take it; its image is added to `images`.

        Raises `Unsupported` where the model takes no images or the part is none, `BadRequest` for
        what is wrong with it.
        """
        kind = part["type"]
        if "image" in kind and not self.takes_images:
            raise Unsupported(
                f"{at}: {self.model} takes no images, so {kind} is not served: {self.why}",
                param=at,
            )
        if kind != "image_url" and not (self.is_local and kind in _LOCAL_KINDS):
            hint = ": send images as image_url" if "image" in kind else ""
            reads = "text and images" if self.takes_images else "text only"
            raise Unsupported(
                f"{at}: {kind} is not served, {self.model} reads {reads}{hint}", param=at
            )
        if role != "user":
            raise BadRequest(
                f"{at}: an image stands in a message of the user, not of role {str(role)[:32]!r}",
                param=at,
            )
        if len(self.images) >= self.max_images:
            raise ImageTooLarge(
                f"{at}: there are more than {self.max_images} images (--max-images)", param=at
            )
        local = kind in _LOCAL_KINDS
        try:
            self.images.append(_local(part, at) if local else _url(part, at, self._read_url))
        except BadRequest as error:
            if error.param is None:
                raise type(error)(f"{at}: {error.message}", param=at) from None
            raise
        return {"type": "image"}

    def refuse_images(self) -> None:
        """For ways on which images cannot go on yet: refuse them, rather than drop them."""
        if self.images:
            at = self.images[0].at
            raise Unsupported(f"{at}: images are not served here yet", param=at)

    @property
    def _read_url(self) -> Callable[[str], ImageSource]:
        from plait.vision import sources  # what reads images waits for the first one

        return sources.read_local if self.is_local else sources.read_url


def take_images(
    messages: Sequence[Mapping[str, Any]], reader: PartReader
) -> list[Mapping[str, Any]]:
    """Messages with their media read by `reader`; the rest is as it was."""
    return [_message(message, reader, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], reader: PartReader, at: str) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message  # what is wrong with it, the template will say
    role = message.get("role")
    read = [
        reader.read(part, f"{at}.content[{i}]", role)
        if isinstance(part, Mapping) and str(part.get("type")) in MEDIA_PARTS
        else part
        for i, part in enumerate(content)
    ]
    return {**message, "content": read}


def _url(part: Mapping[str, Any], at: str, read: Callable[[str], ImageSource]) -> ImagePart:
    _only(part, _PART_KEYS, at)
    given = part.get("image_url")
    if isinstance(given, str):  # as some clients write it
        given = {"url": given}
    if not isinstance(given, Mapping):
        raise _wrong(f"{at}.image_url", 'must be an object: {"url": "data:image/png;base64,…"}')
    _only(given, _URL_KEYS, f"{at}.image_url")
    url, detail = given.get("url"), given.get("detail")
    if not isinstance(url, str):
        raise _wrong(f"{at}.image_url.url", "must be a string")
    if detail is not None and detail not in DETAILS:
        raise _wrong(f"{at}.image_url.detail", "must be one of " + ", ".join(DETAILS))
    return ImagePart(at=f"{at}.image_url", source=read(url), detail=detail or "auto")


def _local(part: Mapping[str, Any], at: str) -> ImagePart:
    """`{"type": "image", "image": …}`; PIL's may be called image_pil, as vLLM has it."""
    kind = part["type"]
    _only(part, frozenset({"type", kind}), at)
    if part.get(kind) is None:
        raise _wrong(f"{at}.{kind}", "is missing: give the image there")
    from plait.vision.sources import read_local

    return ImagePart(at=f"{at}.{kind}", source=read_local(part[kind]))


def _only(value: Mapping[str, Any], known: frozenset[str], at: str) -> None:
    for key in value:
        if key not in known:
            shown = str(key)[:64]
            raise _wrong(
                f"{at}.{shown}", "is not known here; known are " + ", ".join(sorted(known))
            )


def _wrong(param: str, what: str) -> BadRequest:
    return BadRequest(f"{param} {what}", param=param)
