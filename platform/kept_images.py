"""The engine's end of `SendImages`: tensors of images for the requests that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.platform.core import Array, Request
from plait.platform.messages import ForgetImages, SendImages, image_name


class KeptImages:
    """Has each image from when it is sent until it is to be forgotten."""

    def __init__(self) -> None:
        self._tensors: dict[str, Mapping[str, Array]] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def take(self, message: SendImages | ForgetImages) -> None:
        """Have what is sent; requests that were added keep what is forgotten."""
        if isinstance(message, SendImages):
            self._tensors.update(message.images)
            return
        for name in message.names:
            self._tensors.pop(name, None)

    def complete(self, request: Request) -> Request:
        """The request with its images' tensors, shared by all that have the same image."""
        if not request.images:
            return request
        items = (
            replace(item, tensors=self._tensors[image_name(request, item)])
            for item in request.images
        )
        return replace(request, images=tuple(items))
