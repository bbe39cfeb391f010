"""The HTTP application: layers, routes and errors put together."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from plait.platform.core import InvalidParameter
from plait.platform.errors import PlaitError
from plait.platform.server.adapters.routes import adapters_router, admin_router
from plait.platform.server.adapters.service import AdapterService
from plait.platform.server.adapters.usage import AdapterCollector, AdapterUsage
from plait.platform.server.admission import Admission
from plait.platform.server.auth import Auth
from plait.platform.server.chat import chat_router
from plait.platform.server.completions import completions_router
from plait.platform.server.context import ServerContext
from plait.platform.server.errors import handle_error, handle_http_exception
from plait.platform.server.gate import Gate
from plait.platform.server.health import health_router
from plait.platform.server.lifecycle import run, serve
from plait.platform.server.limits import BodyLimits
from plait.platform.server.metrics import Metrics, measure_lag, metrics_router
from plait.platform.server.models import models_router
from plait.platform.server.openapi import describe
from plait.platform.server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from plait.platform.server.scope import REQUEST_ID_HEADER, RequestScope
from plait.platform.server.structured.grammars import Grammars
from plait.platform.server.structured.metrics import GrammarMetrics
from plait.platform.server.tokenize import tokenize_router
from plait.vision.held import HeldImages
from plait.vision.hosts import AllowList
from plait.vision.limits import HELD_BYTES
from plait.vision.preparation import ImagePreparation

if TYPE_CHECKING:
    from plait.platform.intake import Intake
    from plait.platform.server.client import EngineClient
    from plait.platform.server.settings import ServerSettings
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.later import ServedProcessor

__all__ = ["create_app", "run", "serve"]


def create_app(
    *,
    client: EngineClient,
    tokenizer: Tokenizer,
    intake: Intake,
    settings: ServerSettings,
    processor: ServedProcessor | None = None,
) -> FastAPI:
    """The application over one engine; owns `client` and closes it when the server ends.

    `processor` is for a model that takes images; without it they are refused.
    """
    context = _context(client, tokenizer, intake, settings, processor)
    app = FastAPI(
        title="Plait",
        version=context.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_layers(context),
        lifespan=_life,
        exception_handlers={
            PlaitError: handle_error,
            InvalidParameter: handle_error,
            HTTPException: handle_http_exception,
        },
    )
    app.state.context = context
    for router in (
        chat_router,
        completions_router,
        models_router,
        adapters_router,
        *([admin_router] if settings.admin_key is not None else []),
        tokenize_router,
        health_router,
        metrics_router,
    ):
        app.include_router(router(context))
    describe(
        app,
        [
            ChatCompletionRequest,
            CompletionRequest,
            TokenizeRequest,
            DetokenizeRequest,
            LoadAdapterRequest,
            UnloadAdapterRequest,
        ],
    )
    return app


def _context(
    client: EngineClient,
    tokenizer: Tokenizer,
    intake: Intake,
    settings: ServerSettings,
    processor: ServedProcessor | None,
) -> ServerContext:
    version = _version()

    def model_name() -> str:
        return context.model_name

    def is_served(name: str) -> bool:
        return name == context.model_name

    adapters = AdapterService(client, settings, tokenizer, is_served=is_served)
    usage = AdapterUsage(adapters.registry)
    metrics = Metrics(client, model_name=model_name, version=version)
    metrics.registry.register(AdapterCollector(client, adapters.registry, usage))
    observed = GrammarMetrics(metrics.registry)
    grammars = Grammars(client, tokenizer, observe=observed.compiled)
    observed.collect_from(client, grammars)
    limits = settings.limits.for_images()
    context = ServerContext(
        client=client,
        tokenizer=tokenizer,
        intake=intake,
        settings=settings,
        admission=Admission(client, shutdown_timeout_s=settings.shutdown_timeout_s),
        adapters=adapters,
        usage=usage,
        grammars=grammars,
        images=ImagePreparation(limits, AllowList.parse(settings.allowed_media)),
        held_images=HeldImages(HELD_BYTES, wait_s=limits.wait_s),
        processor=processor,
        metrics=metrics,
        pool=ThreadPoolExecutor(_num_threads(settings), thread_name_prefix="plait-http"),
        version=version,
        created=int(time.time()),
    )
    metrics.images.watch(context.images, context.held_images, processor)
    return context


def _num_threads(settings: ServerSettings) -> int:
    return max(1, min(settings.num_threads, os.cpu_count() or 1))


def _version() -> str:
    try:
        return importlib.metadata.version("plait")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"


def _layers(context: ServerContext) -> list[Middleware]:
    """Outermost first. CORS stands before the keys: a preflight request carries none."""
    settings = context.settings
    layers = [Middleware(RequestScope, metrics=context.metrics, log_requests=settings.log_requests)]
    if settings.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER, "retry-after"],
            )
        )
    layers.append(Middleware(Auth, settings=settings))
    layers.append(Middleware(Gate, context=context))
    layers.append(
        Middleware(BodyLimits, settings=settings, takes_images=lambda: context.takes_images)
    )
    return layers


@asynccontextmanager
async def _life(app: FastAPI) -> AsyncIterator[None]:
    context: ServerContext = app.state.context
    lag = asyncio.ensure_future(measure_lag(context.metrics.loop_lag))
    try:
        yield
    finally:
        lag.cancel()
        await asyncio.gather(lag, return_exceptions=True)
        await asyncio.to_thread(context.grammars.close)
        await context.adapters.close()
        await context.client.close()
        context.images.close()
        if context.processor is not None:
            context.processor.close()
        context.pool.shutdown(wait=False, cancel_futures=True)
