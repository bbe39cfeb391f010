"""`plait serve`: an engine process, an HTTP server, and what is said while they start."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from plait.platform.cli.command import TERMINATED
from plait.platform.cli.settings import engine_options, server_settings
from plait.platform.cli.sources import Resolved
from plait.platform.errors import ConfigError, PlaitError
from plait.platform.server.settings import NamedSource

if TYPE_CHECKING:
    from rich.console import Console

    from plait.platform.config import Options
    from plait.platform.server.adapters.service import AdapterService
    from plait.platform.server.process import ProcessClient
    from plait.platform.server.settings import ServerSettings
    from plait.platform.server.structured.grammars import Grammars
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.later import LaterProcessor


_OPEN_AFTER_S = 2.0  # after which the processor of images is made, for some seconds, in a thread


def serve(*, flags: Resolved) -> None:
    """Serve MODEL over HTTP: OpenAI's chat completions and completions."""
    options, settings = engine_options(flags), server_settings(flags)
    _set_up_logs(flags["log_level"])
    listener = None if settings.uds else listen_on(settings.host, settings.port)
    # Imported here: the engine process starts its own imports meanwhile.
    from rich.console import Console

    console = Console(stderr=True)
    is_default = options.model is None
    try:
        if is_default:
            options, settings = _with_default(options, settings, flags)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(options, settings, listener, console, is_default=is_default))
    except asyncio.CancelledError:
        raise typer.Exit(TERMINATED) from None  # told to end before it was ready
    finally:
        if listener is not None:
            listener.close()


def listen_on(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before minutes go into loading a model for it."""
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}", param="host") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port, or "
            "end what listens there",
            param="port",
        ) from None
    return listener


def _with_default(
    options: Options, settings: ServerSettings, flags: Resolved
) -> tuple[Options, ServerSettings]:
    """The default model with its draft model and adapters, as far as the flags name none."""
    from plait.platform.demo.default import default_adapters, with_default, with_default_draft

    if not flags.given("speculative_config"):
        options = with_default_draft(options)
    options = with_default(options)
    if settings.adapters or settings.max_adapters == 0:
        return options, settings
    found = default_adapters(options).items()
    adapters = tuple(NamedSource(name=name, source=str(path)) for name, path in found)
    return options, replace(settings, adapters=adapters)


async def _serve(
    options: Options,
    settings: ServerSettings,
    listener: socket.socket | None,
    console: Console,
    *,
    is_default: bool,
) -> None:
    began = time.monotonic()
    client, tokenizer = await _start(options, console)
    adapters: AdapterService | None = None
    opening: asyncio.Task[None] | None = None
    try:
        from plait.platform.cli.banner import show
        from plait.platform.cli.tries import tries
        from plait.platform.intake import Intake
        from plait.platform.server.app import create_app
        from plait.platform.server.app import serve as run_server
        from plait.vision.later import LaterProcessor, processor_of

        config = client.config
        assert config is not None, "a started client has its engine's config"
        with _cancelled_by(signal.SIGTERM):
            processor = await asyncio.to_thread(processor_of, config.model, options, tokenizer)
        app = create_app(
            client=client,
            tokenizer=tokenizer,
            intake=Intake(config, tokenizer),
            settings=settings,
            processor=processor,
        )
        adapters = app.state.context.adapters
        with _cancelled_by(signal.SIGTERM):
            await adapters.load_all(settings.adapters)
        if listener is not None:
            listener.listen()  # whoever reads the URL can connect, if only to wait a moment
        url = _url(settings, listener)
        names = [named.name for named in adapters.registry.entries()]
        show(console, client, url=url, seconds=time.monotonic() - began, adapters=names)
        if is_default:
            has_key = bool(settings.api_keys or settings.grants)
            commands = tries(url, config.model, names, has_key=has_key, socket=settings.uds)
            console.out(commands, highlight=False)
        later = processor if isinstance(processor, LaterProcessor) else None
        opening = asyncio.create_task(_open(app.state.context.grammars, later))
        await run_server(app, settings, sockets=[listener] if listener else None)
    finally:
        if opening is not None:
            opening.cancel()
        if adapters is not None:
            await adapters.close()  # where serving did not even begin
        await client.close()


async def _open(grammars: Grammars, processor: LaterProcessor | None) -> None:
    """Have ready what the first schema and the first image want, but behind the first answers."""
    try:
        await asyncio.to_thread(grammars.open_early)
    except Exception:  # the first schema fails with it
        logging.getLogger("plait.server").exception("the compiler of grammars could not be started")
    if processor is None:
        return
    await asyncio.sleep(_OPEN_AFTER_S)
    try:
        await asyncio.to_thread(processor.open)
    except PlaitError as error:
        logging.getLogger("plait.server").error("images cannot be processed: %s", error.message)


async def _start(options: Options, console: Console) -> tuple[ProcessClient, Tokenizer]:
    """Start the engine; load the tokenizer and the web framework while it loads weights."""
    from plait.platform.cli.banner import PhaseLog
    from plait.platform.server.process import ProcessClient
    from plait.vision.early import check_family

    await asyncio.to_thread(check_family, options)
    early = tokenizer_source(options)
    engine = asyncio.create_task(ProcessClient.start(options, on_phase=PhaseLog(console)))
    server = asyncio.create_task(asyncio.to_thread(_import_server, options))
    # A hub id has to be fetched first, which the engine does.
    load = None if early is None else asyncio.to_thread(_load_tokenizer, options, early)
    tokenizer = None if load is None else asyncio.create_task(load)
    tasks = [task for task in (engine, server, tokenizer) if task is not None]
    try:
        with _cancelled_by(signal.SIGTERM):
            # Where several fail, the engine's cause says most.
            client = await engine
            await server
            if tokenizer is not None:
                return client, await tokenizer
            assert options.model is not None, "the default model lies on this machine"
            return client, await asyncio.to_thread(_load_tokenizer, options, options.model)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not engine.cancelled() and engine.exception() is None:
            await engine.result().close()
        raise


@contextmanager
def _cancelled_by(number: signal.Signals) -> Iterator[None]:
    """Let a signal unwind this task, so that the engine process is ended and reaped."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "runs in a task"
    loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


def tokenizer_source(options: Options) -> str | Path | None:
    """Where the tokenizer lies on this machine; None for a hub id, which is fetched first."""
    if options.model is None:
        from plait.platform.demo.embedded import model_path

        return model_path()
    path = Path(options.model).expanduser()
    if not path.exists():
        return None
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return files[0] if files and not (path / "config.json").exists() else path


def _load_tokenizer(options: Options, source: str | Path) -> Tokenizer:
    from plait.platform.text.tokenizer import Tokenizer

    return Tokenizer.load(source, chat_template=options.chat_template, revision=options.revision)


def _import_server(options: Options) -> None:
    import plait.platform.server.app  # noqa: F401
    from plait.vision.decode import guard_process

    guard_process()
    directory = None if options.model is None else Path(options.model).expanduser()
    if options.encoder_cache_bytes != 0 and directory is not None and directory.is_dir():
        from plait.vision.later import was_made
        from plait.vision.processor import import_early

        if not was_made(options, directory):
            import_early(directory)


def _url(settings: ServerSettings, listener: socket.socket | None) -> str:
    if listener is None:
        return f"unix:{settings.uds}"
    port = listener.getsockname()[1]
    host = settings.host.strip("[]")
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}{settings.root_path}"


def _set_up_logs(level: str) -> None:
    logging.getLogger("uvicorn").setLevel("WARNING")  # it tells what the banner tells
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s server: %(message)s")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
