"""A session with a server: opened by the constructor, kept alive by a thread, ended by :meth:`TwinkleClient.close`."""

import atexit
import hashlib
import itertools
import logging
import re
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from twinkle_client.client.adapter_sequence import AdapterSequence
from twinkle_client.client.heartbeat import Heartbeat
from twinkle_client.client.json_body import encode
from twinkle_client.client.retries import RETRIED_STATUSES, Backoff, RetryPolicy, read_seconds
from twinkle_client.client.transport import HttpCall, Transport
from twinkle_client.environment import read_environment
from twinkle_client.errors import (
    ConnectionLostError,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    ServerError,
    SessionLostError,
    TwinkleClientError,
    invalid,
)
from twinkle_client.protocol.base import IDEMPOTENCY_HEADER, SESSION_HEADER, SESSION_LOST
from twinkle_client.protocol.runs import (
    Checkpoint,
    CheckpointPathResponse,
    CheckpointsListResponse,
    Cursor,
    DeleteCheckpointResponse,
    MetricPoint,
    ParsedCheckpointTwinklePath,
    RunMetricsResponse,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoResponse,
)
from twinkle_client.protocol.sessions import (
    CapacityInfoResponse,
    CreateSessionResponse,
    GetServerCapabilitiesResponse,
)
from twinkle_client.protocol.verbs import SaveResponse

__all__ = ["AnswerT", "TwinkleClient", "adapter_seed", "parsed"]

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_NO_RETRIES = RetryPolicy(deadline=0.0)
_NOT_YET = 408
_TRY_AGAIN = '"try_again"'  # in the body of the server's own 408
_SHORTEST_POLL = 1.0  # seconds; any other 408 that comes earlier is a failure
_BEAT_SECONDS = 10.0  # the timeout of a heartbeat and of the request that ends the session
# How many asynchronous calls can wait at the same time, each in a thread; waiting threads cost little.
_ASYNC_CALLS = 64


class TwinkleClient:
    """A session with a server. Threads may share it.

    base_url: the server's address with or without /api/v1, by default TWINKLE_SERVER_URL; api_key: by default
    TWINKLE_SERVER_TOKEN. ``timeout``: how long the server may be silent during a request; ``retry_deadline``: how
    long a request is retried after its first failure; both in seconds. ``wait_for_limits``: for how many seconds a
    request is retried if a limit of the tenant is full, such as that of adapters; by default TWINKLE_WAIT_FOR_LIMITS,
    else 0: LimitError at once. ``connect_deadline``: for how many seconds a server that has not answered yet is tried;
    by default TWINKLE_CONNECT_DEADLINE, else 20. ``seed``: for shuffling dataloaders that are given no seed; those of
    adapters are derived from it.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        session_heartbeat_interval: float = 10,
        *,
        route_prefix: str = "/twinkle",
        session_metadata: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
        retry_deadline: float = 300.0,
        wait_for_limits: float | None = None,
        connect_deadline: float | None = None,
        seed: int | None = None,
        http_transport: httpx.BaseTransport | None = None,
    ) -> None:
        if session_heartbeat_interval <= 0:
            raise invalid("session_heartbeat_interval", session_heartbeat_interval, "seconds, more than 0")
        environment = read_environment()
        address = base_url or environment.server_url
        self.api_key = api_key or environment.server_token
        self.route_prefix = "/" + route_prefix.strip("/")
        self.seed = seed
        retries = RetryPolicy(
            retry_deadline,
            read_seconds(wait_for_limits, "wait_for_limits", environment.wait_for_limits, "TWINKLE_WAIT_FOR_LIMITS"),
            connect_deadline=read_seconds(
                connect_deadline, "connect_deadline", environment.connect_deadline, "TWINKLE_CONNECT_DEADLINE"
            ),
        )
        self._transport = Transport(address, self.api_key, retries, timeout, http_transport)
        self.base_url = self._transport.base_url
        self._closed = False
        self._lock = threading.Lock()
        self._sequences: dict[tuple[str, str], AdapterSequence] = {}
        self.adapters: set[tuple[str, str]] = set()  # (model, name) of the adapters that this session has added
        self._model_numbers = itertools.count()
        self._pool: ThreadPoolExecutor | None = None
        self._heartbeat: Heartbeat | None = None
        self.session_id: str | None = None
        try:
            self.session_id = self.create_session(session_metadata)
        except BaseException:
            self._transport.close()
            raise
        # Heartbeats have their own connections, so that they never wait for a connection that requests hold.
        self._beats = Transport(address, self.api_key, _NO_RETRIES, _BEAT_SECONDS, http_transport)
        self._heartbeat = Heartbeat(self.session_id, session_heartbeat_interval, self._beat)
        atexit.register(self.close)

    def __enter__(self) -> "TwinkleClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """End the session: its adapters leave the device, saved checkpoints stay. Further requests raise an error.

        If the server takes longer than ten seconds, this returns without waiting for its answer: the server has the
        request and ends the session by itself.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        assert self._heartbeat is not None
        try:
            self._heartbeat.stop()
            if self._heartbeat.lost is None:
                self._finish_session()
        finally:  # also after KeyboardInterrupt
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._beats.close()
            self._transport.close()

    # --- the session ------------------------------------------------------------------------------------------------

    def create_session(self, metadata: Mapping[str, Any] | None = None) -> str:
        """Open another session, which the caller must keep alive; the constructor has opened the client's own."""
        body = {"metadata": None if metadata is None else dict(metadata)}
        answer = self._send(HttpCall("POST", self._gateway("create_session"), encode(body), headers=_one_key()))
        return self._parsed(CreateSessionResponse, answer).session_id

    def _beat(self) -> None:
        body = encode({"session_id": self.session_id})
        self._beats.send(HttpCall("POST", self._gateway("session_heartbeat"), body))

    def _finish_session(self) -> None:
        """Ask the server to end the session. If it does not, it ends the session when heartbeats stay away."""
        body = encode({"session_id": self.session_id})
        call = HttpCall("POST", self._gateway("finish_session"), body, headers=self._session_headers())
        try:
            self._beats.send(call)
        except ConnectionLostError as error:
            logger.warning(
                "the server did not confirm the end of session %s (%s); it ends the session by itself, at the latest "
                "when heartbeats stay away for a while, and keeps its adapters as checkpoints",
                self.session_id,
                error,
            )
        except TwinkleClientError:
            return

    # --- what the server has ----------------------------------------------------------------------------------------

    def health_check(self) -> bool:
        try:
            self._send(HttpCall("GET", self._gateway("healthz")), _NO_RETRIES)
        except TwinkleClientError:
            return False
        return True

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        return self._get(GetServerCapabilitiesResponse, "get_server_capabilities")

    def get_capacity_info(self) -> CapacityInfoResponse:
        return self._get(CapacityInfoResponse, "capacity_info")

    def list_training_runs(self, limit: int = 20, offset: int = 0, all_users: bool = False) -> list[TrainingRun]:
        return self.list_training_runs_with_cursor(limit, offset, all_users)[0]

    def list_training_runs_with_cursor(
        self, limit: int = 20, offset: int = 0, all_users: bool = False
    ) -> tuple[list[TrainingRun], Cursor]:
        query = {"limit": str(limit), "offset": str(offset)}
        if all_users:
            query["all_users"] = "true"
        answer = self._get(TrainingRunsResponse, "training_runs", query)
        return answer.training_runs, answer.cursor

    def get_training_run(self, run_id: str) -> TrainingRun:
        return self._get(TrainingRun, f"training_runs/{quote(run_id, safe='')}")

    def find_training_run_by_model(self, base_model: str) -> list[TrainingRun]:
        """Return those of the newest hundred runs that have this base model."""
        return [run for run in self.list_training_runs(limit=100) if run.base_model == base_model]

    def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Return the checkpoints of a run, oldest first."""
        return self._get(CheckpointsListResponse, f"training_runs/{quote(run_id, safe='')}/checkpoints").checkpoints

    def get_checkpoint_path(self, run_id: str, checkpoint_id: str) -> ParsedCheckpointTwinklePath:
        """Return the paths of a checkpoint; its id is ``weights/<name>`` or ``sampler_weights/<name>``."""
        address = f"checkpoint_path/{quote(run_id, safe='')}/{quote(checkpoint_id)}"
        answer = self._get(CheckpointPathResponse, address)
        return ParsedCheckpointTwinklePath(
            path=answer.path,
            twinkle_path=answer.twinkle_path,
            training_run_id=run_id,
            checkpoint_type=checkpoint_id.split("/", 1)[0],
            checkpoint_id=checkpoint_id,
        )

    def get_checkpoint_twinkle_path(self, run_id: str, checkpoint_id: str) -> str:
        return self.get_checkpoint_path(run_id, checkpoint_id).twinkle_path

    def get_latest_checkpoint_path(self, run_id: str) -> str | None:
        checkpoints = self.list_checkpoints(run_id)
        return self.get_checkpoint_path(run_id, checkpoints[-1].checkpoint_id).path if checkpoints else None

    def delete_checkpoint(self, run_id: str, checkpoint_id: str) -> DeleteCheckpointResponse:
        address = f"training_runs/{quote(run_id, safe='')}/checkpoints/{quote(checkpoint_id)}"
        answer = self._send(HttpCall("DELETE", self._gateway(address)))
        return self._parsed(DeleteCheckpointResponse, answer)

    def get_weights_info(self, twinkle_path: str | SaveResponse) -> WeightsInfoResponse:
        body = encode({"twinkle_path": twinkle_path})
        answer = self._send(HttpCall("POST", self._gateway("weights_info"), body))
        return self._parsed(WeightsInfoResponse, answer)

    # --- curves -------------------------------------------------------------------------------------------------------

    def log_metrics(self, run_id: str, values: Mapping[str, float], step: int | None = None) -> MetricPoint:
        """Add numbers, such as a reward, to the run's metrics; without ``step``, at the newest optimizer step.

        A request whose answer was lost is sent again, and its point may then be stored twice.
        """
        body = encode({"step": step, "values": {name: float(value) for name, value in values.items()}})
        answer = self._send(HttpCall("POST", self._gateway(f"training_runs/{quote(run_id, safe='')}/metrics"), body))
        return self._parsed(MetricPoint, answer)

    def get_metrics(self, run_id: str, since: int = 0) -> list[MetricPoint]:
        """Return all points after number ``since``, oldest first, both measured by the server and logged by clients."""
        address, points, more = f"training_runs/{quote(run_id, safe='')}/metrics", [], True
        while more:
            answer = self._get(RunMetricsResponse, address, {"since": str(since)})
            points += answer.points
            since, more = answer.next, answer.more
        return points

    # --- for models, samplers and remote objects ----------------------------------------------------------------------

    def post(self, path: str, body: bytes, *, once: bool = False) -> Any:
        """Send a POST request of this session and return the answer's JSON.

        ``once`` adds an idempotency key, by which the server recognises the request if it is sent again.
        """
        headers = self._session_headers() | (_one_key() if once else {})
        return self._send(HttpCall("POST", path, body, headers=headers))

    def get(self, path: str) -> Any:
        return self._send(HttpCall("GET", path, headers=self._session_headers()))

    def wait_for(self, path: str, body: bytes) -> Any:
        """Send a POST request until its answer is no longer 408, "not yet", and return the answer's JSON.

        The server delays each 408 for a while, and the request is then sent again at once. A 408 in less than a second
        without the server's body comes from a proxy: it is retried with waits in between, until ``retry_deadline``.
        Failures of the connection are retried as usual.
        """
        headers = {**self._session_headers(), "Accept": "application/json"}
        patience = replace(self._transport.retries, statuses=RETRIED_STATUSES - {_NOT_YET})
        backoff = Backoff(patience)
        while True:
            sent = time.monotonic()
            try:
                return self._send(HttpCall("POST", path, body, headers=headers), patience)
            except ServerError as error:
                if error.status != _NOT_YET:
                    raise
                # A server can be configured to answer in less than a second (clients.long_poll_seconds).
                if time.monotonic() - sent >= _SHORTEST_POLL or _TRY_AGAIN in error.detail:
                    backoff = Backoff(patience)
                    continue
                wait = backoff.next_wait()
                if wait is None:
                    raise
                if backoff.failures == 1:
                    logger.warning("%s; trying again for up to %g s", error, patience.deadline)
            time.sleep(wait)

    def next_model_number(self) -> int:
        """Return a number that no other model of this session has, for Tinker's create_model."""
        return next(self._model_numbers)

    def download(self, path: str, target: BinaryIO) -> None:
        """Write the body of an answer to ``target``, which must be empty."""
        self._require_open()
        self._transport.download(HttpCall("GET", path), target)

    def sequence(self, model: str, adapter_name: str) -> AdapterSequence:
        """Return the sequence of an adapter's requests, which all model objects of this session share."""
        with self._lock:
            return self._sequences.setdefault((model, adapter_name), AdapterSequence())

    def adapter_seed(self, adapter_name: str) -> int | None:
        """Return the seed of a new adapter: :func:`adapter_seed`, or None if the client has no seed."""
        return None if self.seed is None else adapter_seed(self.seed, adapter_name)

    @property
    def thread_pool(self) -> ThreadPoolExecutor:
        """Return the thread pool in which asynchronous calls wait for their answers."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_ASYNC_CALLS, thread_name_prefix="twinkle-client")
            return self._pool

    # --- inside -------------------------------------------------------------------------------------------------------

    def _gateway(self, address: str) -> str:
        return f"{self.route_prefix}/{address}"

    def _get(self, kind: type[AnswerT], address: str, query: Mapping[str, str] | None = None) -> AnswerT:
        # Without the session header: runs and checkpoints outlive the session.
        return self._parsed(kind, self._send(HttpCall("GET", self._gateway(address), query=query or {})))

    def _session_headers(self) -> dict[str, str]:
        return {} if self.session_id is None else {SESSION_HEADER: self.session_id}

    def _send(self, call: HttpCall, retries: RetryPolicy | None = None) -> Any:
        self._require_open()
        if SESSION_HEADER not in call.headers:
            return self._transport.send(call, retries)
        assert self.session_id is not None
        assert self._heartbeat is not None
        if self._heartbeat.lost is not None:
            raise SessionLostError(self.session_id, self._heartbeat.lost)
        try:
            return self._transport.send(call, retries)
        except (InvalidRequestError, NotFoundError, GoneError) as error:
            if not self._says_session_is_lost(error):
                raise
            self._heartbeat.mark_lost(error.detail)
            raise SessionLostError(self.session_id, error.detail) from error

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("this client was closed: make a new one with init_twinkle_client()")

    def _says_session_is_lost(self, error: InvalidRequestError | NotFoundError | GoneError) -> bool:
        """Return whether an error means that the session is lost: by its code, else by its text.

        Servers that send no code name the session in the text. A run's id, ``<session>-<adapter>``, must not match.
        """
        if error.code is not None:
            return error.code == SESSION_LOST
        return bool(re.search(rf"{re.escape(str(self.session_id))}(?![\w-])", error.detail))

    def _parsed(self, kind: type[AnswerT], answer: Any) -> AnswerT:
        return parsed(kind, answer, self.base_url)


def adapter_seed(seed: int, adapter_name: str) -> int:
    """Return the seed of an adapter's initial weights, made of a program's seed and the adapter's name.

    The library makes the same seed, so that a script's adapters begin with the same weights locally and on a server.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}\n{adapter_name}".encode()).digest()[:4])


def parsed(kind: type[AnswerT], answer: Any, url: str) -> AnswerT:
    """Return an answer as a type of the protocol; raise ServerError if it does not fit."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ServerError(200, f"not a {kind.__name__}: {place or 'the answer'}: {first['msg']}", url) from None


def _one_key() -> dict[str, str]:
    return {IDEMPOTENCY_HEADER: uuid.uuid4().hex}
