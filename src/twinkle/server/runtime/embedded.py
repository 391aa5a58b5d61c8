"""The embedded runtime: the services of all models in one process under uvicorn; each model has a compute thread."""

import asyncio
import logging
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import cast

import uvicorn
import uvloop
from fastapi import FastAPI

from twinkle.errors import TwinkleServerError
from twinkle.server.app import make_app
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.loading import load_served_model
from twinkle.server.config import ServerConfig
from twinkle.server.config.applications import ServedModelConfig
from twinkle.server.config.timings import Timings
from twinkle.server.gateway.fleet import Services
from twinkle.server.gateway.gateway import Gateway
from twinkle.server.gateway.operator_requests import answer_operators
from twinkle.server.http.connections import BoundedProtocol, Connections, connections_within_open_files
from twinkle.server.processors.service import configured_processors
from twinkle.server.runtime.assembly import Process, let_threads_alternate, run_maintenance
from twinkle.server.runtime.generated_key import prepare_key
from twinkle.server.runtime.process import announcement, listen, recorded, url_of
from twinkle.server.state.errors import StorageFullError
from twinkle.server.telemetry import instruments

logger = logging.getLogger(__name__)

_OPEN_FILES = 65_536

LoadModel = Callable[[ServedModelConfig, Timings], ServedModel]


def serve_embedded(config: ServerConfig, notes: Sequence[str] = (), load: LoadModel = load_served_model) -> None:
    """Serve until SIGTERM or SIGINT, then finish the work that runs and write snapshots of changed adapters.

    TwinkleServerError if a service loop ends with an error: then the server stops, too. ``load`` loads each model.
    """
    let_threads_alternate()
    _allow_many_connections()
    listener = listen(config.http_options.host, config.http_options.port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, notes, listener, load))
    finally:
        listener.close()


async def _serve(config: ServerConfig, notes: Sequence[str], listener: socket.socket, load: LoadModel) -> None:
    process = await Process.open(config)
    try:
        about_key = await prepare_key(config, process.store, may_show=True)
        models = [await asyncio.to_thread(load, served, config.timings) for served in config.served_models]
        connections = Connections(
            connections_within_open_files(config.limits.max_connections_per_address, config.limits.max_header_bytes),
            lambda limit: process.telemetry.metrics.counter(instruments.REFUSALS, limit).inc(),
        )
        app = make_app(lambda app: _running(app, process, models, lambda why: server.fail(why)), process.telemetry)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=cast("type[asyncio.Protocol]", partial(BoundedProtocol, connections)),
            ws="none",
            timeout_keep_alive=75,
            backlog=connections.limits.backlog,
            timeout_graceful_shutdown=5,  # for uploads and slow readers; long polls are answered at once
            lifespan="on",
        )
        local_url = url_of(*listener.getsockname()[:2])
        text = announcement(
            config, notes, [model.memory for model in models], config.public_url or local_url, about_key
        )
        server = _Server(settings, process, text)
        with recorded(config.data_dir) as record:
            record(local_url)  # commands ask the server itself, not the proxy at public_url
            await server.serve(sockets=[listener])
        if server.failure is not None:
            raise TwinkleServerError(server.failure)
    finally:
        await process.close()


class _Server(uvicorn.Server):
    """A uvicorn server that prints its announcement once it serves, and answers long polls when it has to stop."""

    def __init__(self, settings: uvicorn.Config, process: Process, announcement: str) -> None:
        super().__init__(settings)
        self.process = process
        self.announcement = announcement
        self.failure: str | None = None  # why it stops without being asked

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.process.spare_collections()
            print(self.announcement, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals here: after a clean shutdown uvicorn would raise the signal again, and not exit with 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        yield
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _end(self, number: signal.Signals) -> None:
        if self.should_exit:
            self.force_exit = True  # asked twice: do not wait for open connections
            return
        logger.info("%s: finishing what runs", number.name)
        self._end_soon()

    def fail(self, why: str) -> None:
        """Stop serving because of a failure: the process ends with an error that says ``why``."""
        self.failure = why
        self._end_soon()

    def _end_soon(self) -> None:
        self.should_exit = True
        if self.started:  # before that no client waits
            self.process.gateway.release_waiters()


@asynccontextmanager
async def _running(
    app: FastAPI, process: Process, models: Sequence[ServedModel], fail: Callable[[str], None]
) -> AsyncIterator[None]:
    """Run the services of all models while the application runs. ``fail`` stops the server with an error."""
    config, store = process.config, process.store
    try:
        await store.sessions.extend_deadlines_after_downtime(time.time())
        await store.ops.extend_deadlines_after_downtime(time.time())
    except StorageFullError as error:  # start anyway: maintenance may free the disk
        logger.error("sessions and results may expire as if the server had been up: %s", error)
    await asyncio.to_thread(store.keep_reserve)
    await asyncio.to_thread(process.files.remove_unfinished)
    for served, model in zip(config.served_models, models, strict=True):
        process.add_model(model, merge=served.model.merge, sampling=served.sampler)
    tokenizers = {name: model.tokenizer_dir for model in models for name in (model.name, *model.aliases)}
    processors = configured_processors(config, tokenizers)
    gateway = process.open_gateway(app, processors)
    await process.start()
    if processors is not None:
        await processors.start()
    process.run(_maintain(gateway), _watch(process.services.values(), fail))
    yield
    process.cancel_tasks()
    await gateway.flush_heartbeats()
    if processors is not None:
        await processors.stop()
    await process.stop()


async def _watch(services: Iterable[Services], fail: Callable[[str], None]) -> None:
    """Stop the server when a service loop fails: without it the server would accept requests and never run them."""
    loops = [loop for entry in services for loop in (entry.training, entry.sampling) if loop is not None]
    broken = [asyncio.create_task(service.loop.broken()) for service in loops]
    try:
        done, _ = await asyncio.wait(broken, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in broken:
            task.cancel()
    what = " and ".join(task.result() for task in done)
    fail(f"{what} stopped by an error that the log shows; start the server again: no acknowledged op is lost")


async def _maintain(gateway: Gateway) -> None:
    """Run maintenance by the clock, and answer requests of operators."""

    async def work(now: float) -> None:
        await gateway.maintain(now)
        await answer_operators(gateway, now)

    await run_maintenance(gateway.resume_interrupted_evictions(), work, gateway.config.timings.maintenance)


def _allow_many_connections() -> None:
    """Raise the limit of open files to at most 65,536: each long poll holds one, and shells often allow a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
