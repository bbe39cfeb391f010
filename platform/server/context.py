"""What every route needs: the engine's client, the tokenizer, the settings, and one thread pool."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.requests import Request as HttpRequest

from plait.platform.errors import DeadlineExceeded, Overloaded
from plait.platform.server.body import Schema, parse_body
from plait.vision.parts import TURNED_OFF, PartReader, takes_images

if TYPE_CHECKING:
    from plait.platform.intake import Intake
    from plait.platform.server.adapters.service import AdapterService
    from plait.platform.server.adapters.usage import AdapterUsage
    from plait.platform.server.admission import Admission
    from plait.platform.server.client import EngineClient
    from plait.platform.server.metrics import Metrics
    from plait.platform.server.settings import ServerSettings
    from plait.platform.server.structured.grammars import Grammars
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.held import HeldImages
    from plait.vision.later import ServedProcessor
    from plait.vision.preparation import ImagePreparation

P = ParamSpec("P")
T = TypeVar("T")

_SMALL_BODY = 64 << 10  # parsed on the loop, in well under a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """One server. Made by `create_app`, shared by all routes."""

    client: EngineClient
    tokenizer: Tokenizer
    intake: Intake
    settings: ServerSettings
    admission: Admission
    adapters: AdapterService
    usage: AdapterUsage
    grammars: Grammars
    images: ImagePreparation
    held_images: HeldImages
    processor: ServedProcessor | None  # None: the model takes no images
    metrics: Metrics
    pool: ThreadPoolExecutor
    version: str
    created: int  # unix seconds

    @property
    def model_name(self) -> str:
        """The name under which the model is served. Raises `Overloaded` before it is known."""
        if self.settings.served_model_name is not None:
            return self.settings.served_model_name
        if self.client.config is None:
            raise Overloaded(self.client.unhealthy_reason or "the engine is starting")
        return self.client.config.model.name

    @property
    def takes_images(self) -> bool:
        """Whether the model can see, and is let to."""
        config = self.client.config
        return config is not None and takes_images(config.model, config.options)

    def part_reader(self) -> PartReader:
        """Takes the images out of one request's messages, or refuses them."""
        reader = PartReader(
            model=self.model_name,
            takes_images=self.takes_images,
            max_images=self.settings.limits.images,
        )
        config = self.client.config
        if config is not None and config.model.vision is not None:
            reader.why = TURNED_OFF
        return reader

    @property
    def fingerprint(self) -> str:
        """Changes with whatever may change the tokens of a seeded request."""
        config = self.client.config
        model = "" if config is None else f"{config.model.dtype}/{config.model.executor}"
        text = f"{self.version}/{self.model_name}/{model}"
        return "plait-" + hashlib.sha256(text.encode()).hexdigest()[:12]

    async def demand(self, adapter: str) -> bool:
        """Have an adapter loaded that a request wants; false where there is none of that name.

        Raises `Overloaded` where as many requests wait so as could run.
        """
        capacity = self.admission.capacity(self.admission.config().scheduler)
        if self.adapters.num_waiting >= capacity:
            raise self.admission.overloaded()
        return await self.adapters.demand(adapter)

    def count_rejection(self) -> None:
        """Count one request that was refused for want of a place, or of an engine."""
        full = self.client.ready and not self.admission.draining
        self.metrics.rejections.labels("max_num_queued_reqs" if full else "not_ready").inc()

    async def in_pool(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` off the event loop. Raises `DeadlineExceeded` past the bound."""
        bound_s = self.settings.limits.render_timeout_s
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self.pool, partial(function, *args, **kwargs))
        try:
            return await asyncio.wait_for(future, bound_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"preparing the request took longer than {bound_s:g} s: make it smaller"
            ) from None

    async def read(self, request: HttpRequest, schema: type[Schema]) -> Schema:
        """The request's body, checked. Raises `BadRequest`."""
        raw = await request.body()
        if len(raw) <= _SMALL_BODY:
            return parse_body(raw, schema, self.settings)
        return await self.in_pool(parse_body, raw, schema, self.settings)


def cache_salt(key_digest: str, wish: str | None) -> str:
    """The salt of a request's blocks: the key's own mixed with what the client asked for.

    Requests without a key and without a wish share blocks; nobody can name another's salt.
    """
    if not key_digest and wish is None:
        return ""
    return hashlib.sha256(f"{key_digest}\0{wish or ''}".encode()).hexdigest()
