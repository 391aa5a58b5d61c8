"""A session with a server: opened by the constructor, kept alive by a thread, ended by :meth:`TwinkleClient.close`."""

import atexit
import hashlib
import logging
import re
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from twinkle_client.client.adapter_sequence import AdapterSequence
from twinkle_client.client.heartbeat import Heartbeat
from twinkle_client.client.json_body import encode
from twinkle_client.client.retries import RetryPolicy
from twinkle_client.client.transport import Call, Transport
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

__all__ = ["TwinkleClient", "parsed"]

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_NO_RETRIES = RetryPolicy(deadline=0.0)
_BEAT_SECONDS = 10.0  # how long a sign of life, or the last one, may take
# Requests that wait at the same time; threads that wait cost little.
_ASYNC_CALLS = 64


class TwinkleClient:
    """A server, a token and a session. Threads may share it.

    base_url: with or without /api/v1, else TWINKLE_SERVER_URL; api_key: else TWINKLE_SERVER_TOKEN. ``timeout`` is how
    long a server may be silent in the middle of a request, and ``retry_deadline`` how long one is tried again after its
    first failure, both in seconds. ``seed`` is what adapters and dataloaders without one of their own are seeded by.
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
        self._transport = Transport(address, self.api_key, RetryPolicy(retry_deadline), timeout, http_transport)
        self.base_url = self._transport.base_url
        self._closed = False
        self._lock = threading.Lock()
        self._sequences: dict[tuple[str, str], AdapterSequence] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._heartbeat: Heartbeat | None = None
        self.session_id: str | None = None
        try:
            self.session_id = self.create_session(session_metadata)
        except BaseException:
            self._transport.close()
            raise
        # Its own connections: a sign of life never waits for one that requests hold.
        self._beats = Transport(address, self.api_key, _NO_RETRIES, _BEAT_SECONDS, http_transport)
        self._heartbeat = Heartbeat(self.session_id, session_heartbeat_interval, self._beat)
        atexit.register(self.close)

    def __enter__(self) -> "TwinkleClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session: its adapters leave the device, what was saved stays. Further requests are errors.

        A server that takes longer than ten seconds over it is left to it: it was told, and needs nobody to listen.
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
        finally:  # whoever loses patience leaves nothing behind here
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._beats.close()
            self._transport.close()

    # --- the session ------------------------------------------------------------------------------------------------

    def create_session(self, metadata: Mapping[str, Any] | None = None) -> str:
        """One more session, kept alive by whoever asked for it. The constructor has made the client's own."""
        body = {"metadata": None if metadata is None else dict(metadata)}
        answer = self._send(Call("POST", self._gateway("create_session"), encode(body), headers=_one_key()))
        return self._parsed(CreateSessionResponse, answer).session_id

    def _beat(self) -> None:
        body = encode({"session_id": self.session_id})
        self._beats.send(Call("POST", self._gateway("session_heartbeat"), body))

    def _finish_session(self) -> None:
        """Servers that have no such route, or never heard of it, end the session when it stays silent."""
        body = encode({"session_id": self.session_id})
        call = Call("POST", self._gateway("finish_session"), body, headers=self._session_headers())
        try:
            self._beats.send(call)
        except ConnectionLostError as error:
            logger.warning(
                "the end of session %s is not confirmed (%s): the server goes on with it by itself, at the latest when "
                "the session has been silent for a while; its adapters are kept as checkpoints",
                self.session_id,
                error,
            )
        except TwinkleClientError:
            return

    # --- what the server has ----------------------------------------------------------------------------------------

    def health_check(self) -> bool:
        try:
            self._send(Call("GET", self._gateway("healthz")), _NO_RETRIES)
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
        """Of the newest hundred."""
        return [run for run in self.list_training_runs(limit=100) if run.base_model == base_model]

    def list_checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Oldest first."""
        return self._get(CheckpointsListResponse, f"training_runs/{quote(run_id, safe='')}/checkpoints").checkpoints

    def get_checkpoint_path(self, run_id: str, checkpoint_id: str) -> ParsedCheckpointTwinklePath:
        """checkpoint_id: ``weights/<name>`` or ``sampler_weights/<name>``."""
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
        answer = self._send(Call("DELETE", self._gateway(address)))
        return self._parsed(DeleteCheckpointResponse, answer)

    def get_weights_info(self, twinkle_path: str) -> WeightsInfoResponse:
        body = encode({"twinkle_path": twinkle_path})
        answer = self._send(Call("POST", self._gateway("weights_info"), body))
        return self._parsed(WeightsInfoResponse, answer)

    # --- curves -------------------------------------------------------------------------------------------------------

    def log_metrics(self, run_id: str, values: Mapping[str, float], step: int | None = None) -> MetricPoint:
        """Numbers for the run's curves, a reward for instance; without a step they belong to the newest one.

        A request whose answer was lost is sent again, and its point may then be there twice.
        """
        body = encode({"step": step, "values": {name: float(value) for name, value in values.items()}})
        answer = self._send(Call("POST", self._gateway(f"training_runs/{quote(run_id, safe='')}/metrics"), body))
        return self._parsed(MetricPoint, answer)

    def get_metrics(self, run_id: str, since: int = 0) -> list[MetricPoint]:
        """All points after number ``since``, oldest first: what the server measured, and what clients logged."""
        address, points, more = f"training_runs/{quote(run_id, safe='')}/metrics", [], True
        while more:
            answer = self._get(RunMetricsResponse, address, {"since": str(since)})
            points += answer.points
            since, more = answer.next, answer.more
        return points

    # --- for models, samplers and remote objects ----------------------------------------------------------------------

    def post(self, path: str, body: bytes, *, once: bool = False) -> Any:
        """A request of this session; ``once`` gives it a key by which the server knows that it has done it before."""
        headers = self._session_headers() | (_one_key() if once else {})
        return self._send(Call("POST", path, body, headers=headers))

    def get(self, path: str) -> Any:
        return self._send(Call("GET", path, headers=self._session_headers()))

    def sequence(self, model: str, adapter_name: str) -> AdapterSequence:
        """The numbers of an adapter's requests: one for all handles of this session."""
        with self._lock:
            return self._sequences.setdefault((model, adapter_name), AdapterSequence())

    def adapter_seed(self, model: str, adapter_name: str) -> int | None:
        """Made from the client's seed, the same for the same adapter in every run of a script."""
        if self.seed is None:
            return None
        digest = hashlib.sha256(f"{self.seed}\n{model}\n{adapter_name}".encode()).digest()
        return int.from_bytes(digest[:4])

    @property
    def thread_pool(self) -> ThreadPoolExecutor:
        """In which asynchronous calls wait."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_ASYNC_CALLS, thread_name_prefix="twinkle-client")
            return self._pool

    # --- inside -------------------------------------------------------------------------------------------------------

    def _gateway(self, address: str) -> str:
        return f"{self.route_prefix}/{address}"

    def _get(self, kind: type[AnswerT], address: str, query: Mapping[str, str] | None = None) -> AnswerT:
        # Without the session: runs and checkpoints outlive it.
        return self._parsed(kind, self._send(Call("GET", self._gateway(address), query=query or {})))

    def _session_headers(self) -> dict[str, str]:
        return {} if self.session_id is None else {SESSION_HEADER: self.session_id}

    def _send(self, call: Call, retries: RetryPolicy | None = None) -> Any:
        if self._closed:
            raise InvalidRequestError("this client was closed: make a new one with init_twinkle_client()")
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

    def _says_session_is_lost(self, error: InvalidRequestError | NotFoundError | GoneError) -> bool:
        """By its code. Servers that send none name the session itself, not a run in it (``<session>-<adapter>``)."""
        if error.code is not None:
            return error.code == SESSION_LOST
        return bool(re.search(rf"{re.escape(str(self.session_id))}(?![\w-])", error.detail))

    def _parsed(self, kind: type[AnswerT], answer: Any) -> AnswerT:
        return parsed(kind, answer, self.base_url)


def parsed(kind: type[AnswerT], answer: Any, url: str) -> AnswerT:
    """An answer as the protocol has it."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ServerError(200, f"not a {kind.__name__}: {place or 'the answer'}: {first['msg']}", url) from None


def _one_key() -> dict[str, str]:
    return {IDEMPOTENCY_HEADER: uuid.uuid4().hex}
