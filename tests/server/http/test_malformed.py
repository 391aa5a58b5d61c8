"""Malformed requests. Each gets an answer that names the mistake, and no other tenant is affected."""

import asyncio
import contextlib
import errno
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from fastapi import FastAPI

from tests.support.servers.running import (
    Server,
    Tenant,
    datum,
    key_for,
    mock_config,
    sample_body,
    tensor,
    training_body,
    training_request,
)
from twinkle.errors import CheckpointError
from twinkle.model.types import LoraSpec
from twinkle.server.backends.compute_thread import Compute
from twinkle.server.http.requests import install_error_handlers
from twinkle.server.services.checkpoints.save_and_load import Checkpoints
from twinkle.server.services.training.run_kind import RunKinds
from twinkle.server.state.errors import StorageFullError
from twinkle.server.state.files.data_dir import DataDir
from twinkle.server.tenancy.tenants import Tenants
from twinkle.server.types import Op, OpKind, RunRecord, SaveWeights
from twinkle.server.wire import tinker_pb2 as pb

LIMIT = 2 * 2**20  # bytes in a request body
JSON_LIMIT = 2**20  # the same for JSON, whose parser blocks all other work
_BOMB = bytes(64 * LIMIT)
_STEP = {"adam_params": {"learning_rate": 0.1}}


class Attacker:
    """A tenant whose every request is wrong. Its session and model are created at the first use."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.tenant = Tenant(server.url, key_for(f"attacker {name}"))

    @cached_property
    def session(self) -> str:
        return self.tenant.session()

    @cached_property
    def model(self) -> str:
        return self.tenant.model(self.session)

    @cached_property
    def sampler(self) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "mock"}
        return str(self.tenant.post("create_sampling_session", body).json()["sampling_session_id"])

    def post(self, where: str, /, **fields: object) -> httpx.Response:
        """Send JSON as Python's json writes it, including NaN."""
        return self.raw(where, json.dumps(fields).encode())

    def raw(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        return self.tenant.post(path, body, **{"Content-Type": "application/json", **headers})

    def train(self, *data: pb.Datum, **fields: object) -> httpx.Response:
        return self.tenant.post("forward_backward", training_body(self.model, 1, data, **fields))

    def inputs(self, **inputs: pb.Tensor) -> httpx.Response:
        """Send one row of three tokens with these inputs for importance_sampling."""
        good = {"logprobs": tensor([-1, -1, -1]), "advantages": tensor([1, 1, 1])}
        return self.train(datum((1, 2, 3, 4), **{**good, **inputs}), loss="importance_sampling")

    def step(self, seq_id: object = 1, **fields: object) -> httpx.Response:
        return self.post("optim_step", **{"model_id": self.model, "seq_id": seq_id, **_STEP, **fields})

    def save(self, name: object, **fields: object) -> httpx.Response:
        return self.post("save_weights", model_id=self.model, seq_id=1, path=name, **fields)

    def load(self, path: object, optimizer: object = True) -> httpx.Response:
        return self.post("load_weights", model_id=self.model, seq_id=1, path=path, optimizer=optimizer)

    def create(self, **fields: object) -> httpx.Response:
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "mock", "lora_config": {"rank": 8}}
        return self.post("create_model", **{**body, **fields})

    def sample(self, **fields: object) -> httpx.Response:
        return self.post("asample", **sample_body(self.sampler, **fields))

    def params(self, **params: object) -> httpx.Response:
        return self.sample(sampling_params={"max_tokens": 4, **params})

    def poll(self, request_id: object) -> httpx.Response:
        return self.post("retrieve_future", request_id=request_id)

    def get(self, path: str) -> httpx.Response:
        return self.tenant.http.get(path)

    def socket(self, *parts: bytes) -> httpx.Response:
        """Send raw bytes and return the complete answer, if there is one."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=10) as connection:
            with contextlib.suppress(OSError):  # the server may close early
                for part in parts:
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
        # A refusal by uvicorn may follow ours, if it reads the rest of the body as another request.
        body = body[: int(headers.get("content-length", len(body)))]
        return httpx.Response(int(lines[0].split()[1]) if head else 0, headers=headers, content=body)

    def head(self, path: str, *headers: str) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"X-API-Key: {self.tenant.key}", *headers, "", ""]
        return "\r\n".join(lines).encode("latin-1")


# name: (a text in the answer, the request)
CASES: dict[str, tuple[str, Callable[[Attacker], httpx.Response]]] = {}


def case(name: str, field: str, attack: Callable[[Attacker], httpx.Response]) -> None:
    assert name not in CASES
    CASES[name] = (field, attack)


def _image(**fields: Any) -> pb.Datum:
    image = pb.Chunk(image=pb.ImageChunk(**fields))
    return pb.Datum(model_input=[image], loss_fn_inputs={"target_tokens": tensor([1], "i8")})


# --- protobuf ---------------------------------------------------------------------------------------------------------


def _proto(body: bytes, **headers: str) -> Callable[[Attacker], httpx.Response]:
    return lambda a: a.raw("forward_backward", body, **{"Content-Type": "application/x-protobuf", **headers})


def _packed(content: bytes, encoding: str) -> Callable[[Attacker], httpx.Response]:
    return _proto(content, **{"Content-Encoding": encoding})


def _gzip(data: bytes) -> bytes:
    import gzip

    return gzip.compress(data, 1)


def _json_pass(model_id: str) -> bytes:
    return json.dumps({"model_id": model_id, "seq_id": 1}).encode()


case("protobuf: noise", "body", _proto(b"\xff" * 100))
case("protobuf: empty", "model_id", _proto(b""))
case("JSON: nothing to train on", "forward_backward_input", lambda a: a.raw("forward_backward", _json_pass(a.model)))
case("JSON: cut off", "body", lambda a: a.raw("forward_backward", _json_pass(a.model)[:-3]))
case("JSON: forward", "forward_input", lambda a: a.raw("forward", _json_pass(a.model)))
case("protobuf: forward", "body", lambda a: a.raw("forward", training_body(a.model, 1)))
case("protobuf: cut off", "body", lambda a: a.raw("forward_backward", training_body(a.model, 1)[:-3]))
case("protobuf: a million datums", "body", _proto(b"\x0a\x01m\x10\x01" + b"\x1a\x00" * 400_000))
case("protobuf: other content type", "seq_id", lambda a: a.raw("forward_backward", training_body(a.model, -1)))
case("zstd bomb", "body", _packed(zstandard.compress(_BOMB), "zstd"))
case("zstd bomb of unknown size", "body", _packed(zstandard.ZstdCompressor().compressobj().compress(_BOMB), "zstd"))
case("zstd of zstd", "Content-Encoding", _packed(zstandard.compress(zstandard.compress(_BOMB)), "zstd, zstd"))
case("zstd that is none", "body", _packed(b"not zstd", "zstd"))
case("zstd that is empty", "body", _packed(b"", "zstd"))
case("gzip bomb", "body", _packed(_gzip(_BOMB), "gzip"))
case("gzip that is none", "body", _packed(b"not gzip", "gzip"))
case("gzip cut off", "body", _packed(_gzip(b"x" * 1000)[:-4], "gzip"))
case("unknown Content-Encoding", "Content-Encoding", _packed(b"x", "br"))

case("no data", "data", lambda a: a.train())
case("5000 datums", "data", lambda a: a.train(*[datum((1, 2))] * 5000))
case("no tokens", "data[0]", lambda a: a.train(pb.Datum(loss_fn_inputs={"target_tokens": tensor([], "i8")})))
case("no targets", "target_tokens", lambda a: a.train(pb.Datum(model_input=datum().model_input)))
case("too long", "data[0]", lambda a: a.train(datum(range(5000))))
case("half a token", "model_input", lambda a: a.train(_with_tokens(b"12345")))
case("negative token", "data[0]", lambda a: a.train(datum((-1, 2, 3))))
case("token beyond the vocabulary", "data[0]", lambda a: a.train(datum((2**31 - 1, 2, 3))))
case("negative target", "data[0]", lambda a: a.train(datum((1, 2), target_tokens=tensor([-5], "i8"))))
case("an image for a model that reads text", "allowed: text", lambda a: a.train(_image(data=b"x", format="png")))
case("an image at another size", "override_dimensions", lambda a: a.train(_image(override_dimensions={"width": 9})))
case("an empty chunk", "encoded_text", lambda a: a.train(pb.Datum(model_input=[pb.Chunk()])))
case("NaN weight", "weights", lambda a: a.train(datum((1, 2, 3), weights=tensor([1, np.nan]))))
case("infinite weight", "weights", lambda a: a.train(datum((1, 2, 3), weights=tensor([1, np.inf]))))
case("NaN advantage", "advantages", lambda a: a.inputs(advantages=tensor([1, np.nan, 1])))
case("infinite logprob", "logprobs", lambda a: a.inputs(logprobs=tensor([-np.inf, 0, 0])))
case("a ratio that overflows", "", lambda a: a.inputs(logprobs=tensor([-1e30, 0, 0])))
case("advantages that overflow", "", lambda a: a.inputs(advantages=tensor([3e38, 3e38, 3e38])))
case("weights of another length", "weights", lambda a: a.train(datum((1, 2, 3), weights=tensor([1, 1, 1]))))
case("weights of another rank", "weights", lambda a: a.train(datum((1, 2, 3), weights=tensor([[1], [1]]))))
case("targets of another length", "data[0]", lambda a: a.train(datum((1, 2, 3), target_tokens=tensor([1], "i8"))))
case("no advantages", "logprobs", lambda a: a.train(datum(), loss="importance_sampling"))
case("a shape that lies", "weights", lambda a: a.train(datum((1, 2), weights=tensor([1], shape=[1_000_000]))))
case("negative dimension", "shape", lambda a: a.train(datum((1, 2), weights=tensor([1], shape=[-1]))))
case("two negative dimensions", "shape", lambda a: a.train(datum((1, 2), weights=tensor([1], shape=[-1, -1]))))
case("dimensions that wrap", "shape", lambda a: a.train(datum((1, 2), weights=tensor([], shape=[2**62, 4]))))
case("three dimensions", "shape", lambda a: a.train(datum((1, 2), weights=tensor([1], shape=[1, 1, 1]))))
case("targets that are floats", "dtype", lambda a: a.train(datum((1, 2), target_tokens=tensor([1.5]))))
case("dtype 0", "dtype", lambda a: a.train(datum((1, 2), weights=pb.Tensor(dense=b"1234", dtype=0, shape=[1]))))
case("dtype 77", "dtype", lambda a: a.train(datum((1, 2), weights=pb.Tensor(dense=b"1234", dtype=77, shape=[1]))))
case("a tensor without data", "weights", lambda a: a.train(datum((1, 2), weights=pb.Tensor(dtype=1, shape=[1]))))
case("an input nobody knows", "mask", lambda a: a.train(datum((1, 2), mask=tensor([1]))))
case("sparse bomb", "shape", lambda a: a.train(datum((1, 2), weights=_sparse([30_000, 30_000], [0] * 30_001, []))))
case(
    "sparse rows that decrease",
    "crow_indices",
    lambda a: a.train(datum((1, 2), weights=_sparse([2, 2], [0, 5, 1], [0]))),
)
case("sparse column beyond", "col_indices", lambda a: a.train(datum((1, 2), weights=_sparse([1, 2], [0, 1], [9]))))
case("unknown loss", "loss", lambda a: a.train(datum(), loss="nonsense"))
case("no loss", "loss", lambda a: a.train(datum(), loss=""))
case("loss with a NUL", "loss", lambda a: a.train(datum(), loss="\0"))
case("loss of a thousand letters", "loss_fn", lambda a: a.train(datum(), loss="l" * 1000))
case("config key nobody knows", "beta", lambda a: a.train(datum(), loss_fn_config={"beta": 1.0}))
case(
    "config that is text", "beta", lambda a: a.train(datum(), loss_fn_config_v2={"beta": pb.LossConfigValue(text="x")})
)
case("forward of an unknown loss", "loss", lambda a: a.train(datum(), loss="nonsense", forward_only=True))


def _with_tokens(tokens: bytes) -> pb.Datum:
    text = pb.EncodedTextChunk(tokens=tokens)
    return pb.Datum(model_input=[pb.Chunk(encoded_text=text)], loss_fn_inputs={"target_tokens": tensor([1], "i8")})


def _sparse(shape: list[int], crow: list[int], col: list[int]) -> pb.Tensor:
    rows, columns = (np.array(numbers, "<i8").tobytes() for numbers in (crow, col))
    csr = pb.SparseCsr(values=np.ones(len(col), "<f4").tobytes(), crow_indices=rows, col_indices=columns)
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=shape)


# --- sequence numbers -------------------------------------------------------------------------------------------------


def _reused(a: Attacker) -> httpx.Response:
    a.tenant.result(a.tenant.optim_step(a.model, 1))
    return a.step(1, adam_params={"learning_rate": 0.2})


def _reused_while_waiting(a: Attacker) -> httpx.Response:
    a.tenant.optim_step(a.model, 5)
    return a.step(5, adam_params={"learning_rate": 0.2})


def _reused_by_another_kind(a: Attacker) -> httpx.Response:
    a.tenant.result(a.tenant.optim_step(a.model, 1))
    return a.tenant.post("forward_backward", training_body(a.model, 1))


case("seq_id -1", "seq_id", lambda a: a.tenant.post("forward_backward", training_body(a.model, -1)))
case("seq_id of 2^31 - 1", "seq_id", lambda a: a.tenant.post("forward_backward", training_body(a.model, 2**31 - 1)))
case("JSON seq_id 0", "seq_id", lambda a: a.step(0))
case("JSON seq_id -1", "seq_id", lambda a: a.step(-1))
case("JSON seq_id of 2^63 - 1", "seq_id", lambda a: a.step(2**63 - 1))
case("JSON seq_id of 2^63", "seq_id", lambda a: a.step(2**63))
case("JSON seq_id of 4000 digits", "seq_id", lambda a: a.step(10**4000))
case("JSON seq_id as text", "seq_id", lambda a: a.step("1"))
case("JSON seq_id as float", "seq_id", lambda a: a.step(1.5))
case("JSON seq_id as bool", "seq_id", lambda a: a.step(True))
case("seq_id used before", "seq_id", _reused)
case("seq_id used before and waiting", "seq_id", _reused_while_waiting)
case("seq_id used before by another call", "seq_id", _reused_by_another_kind)


# --- JSON -------------------------------------------------------------------------------------------------------------

for _name, _body in {
    "nothing": b"",
    "spaces": b"   ",
    "half": b'{"model_id": "x", ',
    "a list": b"[]",
    "a text": b'"x"',
    "a number": b"5",
    "null": b"null",
    "two values": b"{} {}",
    "not UTF-8": b'{"model_id": "\xff\xfe"}',
    "UTF-16": '{"model_id": "x"}'.encode("utf-16"),
    "half a surrogate": b'{"model_id": "\\ud800", "seq_id": 1}',
    "10 000 lists deep": b"[" * 10_000,
    "10 000 objects deep": b'{"a":' * 10_000,
    "a number of 100 000 digits": b'{"model_id": "x", "seq_id": ' + b"9" * 100_000 + b"}",
}.items():
    for _path in ("optim_step", "create_session", "asample", "retrieve_future", "unload_model", "forward"):
        case(f"JSON {_path}: {_name}", "", lambda a, path=_path, body=_body: a.raw(path, body))

case("model_id missing", "model_id", lambda a: a.post("optim_step", seq_id=1))
case("model_id a number", "model_id", lambda a: a.post("optim_step", model_id=5, seq_id=1))
case("model_id empty", "model_id", lambda a: a.post("optim_step", model_id="", seq_id=1))
case("model_id endless", "model_id", lambda a: a.post("optim_step", model_id="m" * 10_000, seq_id=1))
case("model_id with NUL", "model_id", lambda a: a.post("optim_step", model_id="a\0b", seq_id=1))
case("model_id nobody has", "model", lambda a: a.post("optim_step", model_id="s:train:0", seq_id=1, **_STEP))
case("learning rate NaN", "learning_rate", lambda a: a.step(adam_params={"learning_rate": float("nan")}))
case("learning rate infinite", "learning_rate", lambda a: a.step(adam_params={"learning_rate": float("inf")}))
case("learning rate negative", "learning_rate", lambda a: a.step(adam_params={"learning_rate": -1.0}))
case("learning rate text", "learning_rate", lambda a: a.step(adam_params={"learning_rate": "1"}))
case("adam_params null", "adam_params", lambda a: a.step(adam_params=None))
case("adam_params a list", "adam_params", lambda a: a.step(adam_params=[]))
case("adam_params misspelt", "learnin_rate", lambda a: a.step(adam_params={"learnin_rate": 1.0}))
case("two optimizers", "adam_params", lambda a: a.step(optim_params={"learning_rate": 1.0}))
case("another type", "type", lambda a: a.step(type="save_weights"))

case("101 tags", "tags", lambda a: a.post("create_session", tags=["t"] * 101))
case("a tag that is a number", "tags", lambda a: a.post("create_session", tags=[1]))
case("a tag with NUL", "tags", lambda a: a.post("create_session", tags=["\0"]))
case("a megabyte of metadata", "user_metadata", lambda a: a.post("create_session", user_metadata={"a": "x" * 200_000}))
case("metadata with NaN", "user_metadata", lambda a: a.post("create_session", user_metadata={"a": float("nan")}))
case("finish without a reason", "reason", lambda a: a.post(f"sessions/{a.session}/finish"))
case("finish for another reason", "reason", lambda a: a.post(f"sessions/{a.session}/finish", reason={"type": "x"}))


# --- models and checkpoints -------------------------------------------------------------------------------------------

case("unknown base model", "base_model", lambda a: a.create(base_model="nobody/knows"))
case("base model by path", "base_model", lambda a: a.create(base_model="/etc/passwd"))
case("base model empty", "base_model", lambda a: a.create(base_model=""))
case("rank 0", "rank", lambda a: a.create(lora_config={"rank": 0}))
case("rank -1", "rank", lambda a: a.create(lora_config={"rank": -1}))
case("rank 10^9", "rank", lambda a: a.create(lora_config={"rank": 10**9}))
case("rank 10^30", "rank", lambda a: a.create(lora_config={"rank": 10**30}))
case("rank 1.5", "rank", lambda a: a.create(lora_config={"rank": 1.5}))
case("rank true", "rank", lambda a: a.create(lora_config={"rank": True}))
case("seed of 65 bits", "seed", lambda a: a.create(lora_config={"rank": 8, "seed": 2**64}))
case("no lora_config", "lora_config", lambda a: a.create(lora_config=None))
case("lora_config misspelt", "ranks", lambda a: a.create(lora_config={"rank": 8, "ranks": 8}))
case("nothing to train", "train_", lambda a: a.create(lora_config=_NOTHING_TRAINED))
case("another optimizer", "optimizer", lambda a: a.create(optimizer_config={"type": "dimuon"}))
case("model_seq_id -1", "model_seq_id", lambda a: a.create(model_seq_id=-1))
case("model_seq_id of 2^63", "model_seq_id", lambda a: a.create(model_seq_id=2**63))
case("session nobody has", "session", lambda a: a.create(session_id="s-0"))
case("metadata that is no text", "user_metadata", lambda a: a.create(user_metadata={"a": 1}))
_NOTHING_TRAINED = {"rank": 8, "train_mlp": False, "train_attn": False, "train_unembed": False}

for _name in (
    "../x",
    "a/b",
    "/etc/passwd",
    "",
    ".",
    "..",
    ".hidden",
    "a\0b",
    "x" * 129,
    "é",
    "a b",
    "a\nb",
    "%2e%2e",
    "a\\b",
):
    case(f"save as {_name[:20]!a}", "path", lambda a, name=_name: a.save(name))
    case(
        f"publish as {_name[:20]!a}",
        "path",
        lambda a, name=_name: a.post("save_weights_for_sampler", model_id=a.model, seq_id=1, path=name),
    )
case("save as a number", "path", lambda a: a.save(5))
case("save as null", "path", lambda a: a.save(None))
case("save for -1 seconds", "ttl_seconds", lambda a: a.save("ck", ttl_seconds=-1))
case("save for ever and ever", "ttl_seconds", lambda a: a.save("ck", ttl_seconds=10**30))
case(
    "publish with two names",
    "sampling_session_seq_id",
    lambda a: a.post("save_weights_for_sampler", model_id=a.model, seq_id=1, path="s", sampling_session_seq_id=0),
)

for _text in (
    "",
    "ck",
    "/etc/passwd",
    "file:///etc/passwd",
    "tinker://",
    "tinker://../../../etc/passwd",
    "tinker://{run}/weights/../../x",
    "tinker://{run}/weights/..",
    "tinker://{run}/weights/",
    "tinker://{run}/weights/a/b",
    "tinker://{run}/state.db/x",
    "tinker://{run}/weights/a\0b",
    "tinker://../weights/ck",
    "tinker://{run}/weights/" + "x" * 5000,
):
    case(f"load {_text[:40]!a}", "path", lambda a, text=_text: a.load(text.format(run=a.model)))
    case(
        f"weights_info {_text[:40]!a}",
        "tinker_path",
        lambda a, text=_text: a.post("weights_info", tinker_path=text.format(run=a.model)),
    )
    case(
        f"sample from {_text[:40]!a}",
        "model_path",
        lambda a, text=_text: a.post(
            "create_sampling_session",
            session_id=a.session,
            sampling_session_seq_id=0,
            model_path=text.format(run=a.model),
        ),
    )
case("load what is not there", "checkpoint", lambda a: a.load(f"tinker://{a.model}/weights/ck"))
case("load another kind", "checkpoint", lambda a: a.load(f"tinker://{a.model}/external_weights/ck"))
case("load with optimizer as text", "optimizer", lambda a: a.load(f"tinker://{a.model}/weights/ck", "yes"))


def _published(a: Attacker) -> str:
    body = {"model_id": a.model, "seq_id": 1, "path": "s"}
    return str(a.tenant.json(a.tenant.submit("save_weights_for_sampler", body))["path"])


def _saved(a: Attacker, rank: int) -> str:
    model = a.tenant.model(rank=rank)
    return str(a.tenant.json(a.tenant.save(model, 1, "ck"))["path"])


case(
    "load an optimizer that was not saved",
    "optimizer",
    lambda a: a.post("load_weights", path=_published(a), model_id=a.model, seq_id=2, optimizer=True),
)
case("load another rank", "rank", lambda a: a.load(_saved(a, rank=4)))
case("delete by a wrong kind", "checkpoint", lambda a: _delete(a, "state.db/x"))
case("delete by a wrong name", "checkpoint", lambda a: _delete(a, "weights/%2e%2e"))
case("delete by a long name", "checkpoint", lambda a: _delete(a, "weights/" + "x" * 4000))
case("delete what is not there", "checkpoint", lambda a: _delete(a, "weights/ck"))


def _delete(a: Attacker, where: str) -> httpx.Response:
    return a.tenant.http.delete(f"training_runs/{a.model}/checkpoints/{where}")


case("archive by a wrong kind", "checkpoint", lambda a: _archive(a, "state.db/x"))
case("archive by a wrong name", "checkpoint", lambda a: _archive(a, "weights/%2e%2e"))
case("archive by a long name", "checkpoint", lambda a: _archive(a, "weights/" + "x" * 4000))
case("archive of what is not there", "checkpoint", lambda a: _archive(a, "weights/ck"))
case("archive of an odd run", "", lambda a: a.get("training_runs/..%2f..%2fetc/checkpoints/weights/ck/archive"))
case("archive by another method", "", lambda a: a.raw(f"training_runs/{a.model}/checkpoints/weights/ck/archive", b"{}"))
case("an archive's address that is none", "not signed", lambda a: a.get("archives/" + "A" * 3000))
case("unload nothing", "model_id", lambda a: a.post("unload_model"))
case("unload null", "model_id", lambda a: a.post("unload_model", model_id=None))
case("unload a number", "model_id", lambda a: a.post("unload_model", model_id=2**70))
case("unload a list", "model_id", lambda a: a.post("unload_model", model_id=["x"]))
case("unload what nobody has", "model", lambda a: a.post("unload_model", model_id="s:train:0"))
case("unload another type", "type", lambda a: a.post("unload_model", model_id=a.model, type="optim_step"))
case("unload beyond the limit", "larger than", lambda a: a.raw("unload_model", b" " * (JSON_LIMIT + 1)))
case("unload in protobuf", "body", lambda a: a.raw("unload_model", training_body(a.model, 1)))
case(
    "unload, packed",
    "body",
    lambda a: a.raw("unload_model", _gzip(json.dumps({"model_id": a.model}).encode()), **{"Content-Encoding": "gzip"}),
)
case("unload a future that nobody asked for", "unknown", lambda a: a.poll(f"{a.model}:{10**18 - 1}"))


def _archive(a: Attacker, where: str) -> httpx.Response:
    return a.get(f"training_runs/{a.model}/checkpoints/{where}/archive")


# --- passes in JSON ---------------------------------------------------------------------------------------------------

_NUMBERS = {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}}
_ADVANTAGES = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}


def _passes(
    *inputs: object,
    path: str = "forward_backward",
    loss: object = "importance_sampling",
    config: object = None,
    tokens: object = (1, 2),
    **headers: str,
) -> Callable[[Attacker], httpx.Response]:
    """Send a datum for each of ``inputs``, which are added to the targets of two tokens."""

    def attack(a: Attacker) -> httpx.Response:
        chunks = {"chunks": [{"tokens": tokens}]}
        data = [{"model_input": chunks, "loss_fn_inputs": {**_NUMBERS, **more}} for more in inputs]
        asked = {"data": data, "loss_fn": loss, "loss_fn_config": config}
        body = {"model_id": a.model, "seq_id": 1, f"{path}_input": asked}
        return a.raw(path, json.dumps(body).encode(), **headers)

    return attack


_REF = {"ref_logps": [-1.0, -2.0]}
for _name, _value in {"2": 2.0, "-1": -1.0, "NaN": float("nan"), "text": "yes", "true": True, "null": None}.items():
    _config = {"disable_lora": _value}
    case(f"disable_lora {_name}", "disable_lora", _passes({}, path="forward", loss="cross_entropy", config=_config))
case("train the base model", "disable_lora", _passes({}, loss="cross_entropy", config={"disable_lora": 1.0}))
case("DPO of one answer", "pairs", _passes(_REF))
case("DPO with half a reference", "data[1]", _passes(_REF, {}))
case("DPO with another loss", "importance_sampling", _passes(_REF, _REF, loss="cross_entropy"))
case("DPO with a short reference", "ref_logps", _passes(_REF, {"ref_logps": [-1.0]}))
case("DPO with a reference in rows", "ref_logps", _passes(_REF, {"ref_logps": {"data": [-1.0, -2.0], "shape": [2, 1]}}))
case("DPO with NaN", "ref_logps", _passes(_REF, {"ref_logps": [-1.0, float("nan")]}))
case("DPO with 1e39", "ref_logps", _passes(_REF, {"ref_logps": [-1.0, -1e39]}))
case(
    "DPO with rewards beyond all numbers",
    "infinity",
    _passes({"ref_logps": [-3e38] * 2}, _REF, config={"dpo_beta": 3.0}),
)
case("DPO without tokens", "data[0]", _passes(_REF, _REF, tokens=[]))
case("DPO with other weights", "weights", _passes({**_REF, "weights": [1.0]}, _REF))
case("DPO beta 0", "dpo_beta", _passes(_REF, _REF, config={"dpo_beta": 0.0}))
case("DPO beta endless", "infinity", _passes(_REF, _REF, config={"dpo_beta": 3e38}))
case("DPO beta as text", "dpo_beta", _passes(_REF, _REF, config={"dpo_beta": "0.1"}))
case("DPO sft weight -1", "dpo_sft_weight", _passes(_REF, _REF, config={"dpo_sft_weight": -1.0}))
case("DPO of another type", "dpo_loss_type", _passes(_REF, _REF, config={"dpo_loss_type": 1.0}))
case("DPO without a reference", "ref_logps", _passes(_ADVANTAGES, config={"dpo_beta": 0.1}))
case("JSON: a loss that is a number", "loss_fn", _passes({}, loss=5))
case("JSON: a custom loss", "loss_fn", _passes({}, loss="custom"))
case("JSON: config a list", "loss_fn_config", _passes({}, config=[1]))
case("JSON: sizes beyond memory", "shape", _passes({"weights": {"data": [], "shape": [2**62, 0]}}))
case("JSON: sizes beyond 64 bits", "shape", _passes({"weights": {"data": [], "shape": [10**30, 0]}}))
case("JSON: five dimensions", "shape", _passes({"weights": {"data": [], "shape": [0] * 5}}))
case("JSON: a number of 400 digits", "weights", _passes({"weights": {"data": [10**400, 1], "shape": [2]}}))
case("JSON: a token of 400 digits", "tokens", _passes({}, tokens=[10**400]))
case("JSON: weights of text", "weights", _passes({"weights": ["1", "1"]}))
case("JSON: inputs null", "weights", _passes({"weights": None}))
case("JSON: packed badly", "body", _passes({}, **{"Content-Encoding": "gzip"}))
case("JSON: packed in an unknown way", "Content-Encoding", _passes({}, **{"Content-Encoding": "deflate"}))
case(
    "JSON: the wrong envelope",
    "forward_input",
    lambda a: a.raw("forward", _json_pass(a.model)[:-1] + b', "forward_backward_input": {}}'),
)


# --- sampling ---------------------------------------------------------------------------------------------------------

_TOKENS = [5, 6, 7]


def _prompt(*chunks: object) -> Callable[[Attacker], httpx.Response]:
    return lambda a: a.sample(prompt={"chunks": list(chunks)})


case("prompt empty", "prompt", _prompt())
case("prompt of empty text", "prompt", _prompt({"type": "encoded_text", "tokens": []}))
case("prompt with token -1", "prompt", _prompt({"type": "encoded_text", "tokens": [-1]}))
case("prompt with token 2^31", "prompt", _prompt({"type": "encoded_text", "tokens": [2**31]}))
case("prompt beyond the vocabulary", "prompt", _prompt({"type": "encoded_text", "tokens": [2**31 - 1]}))
case("prompt of floats", "prompt", _prompt({"type": "encoded_text", "tokens": [1.0]}))
case("prompt with an image", "reads text only", _prompt({"type": "image", "data": "", "format": "png"}))
case("prompt with a location", "never opens", _prompt({"type": "image_asset_pointer", "location": "/etc/passwd"}))
case("prompt beyond the context", "prompt", _prompt({"type": "encoded_text", "tokens": [1] * 5000}))
case("no samples", "num_samples", lambda a: a.sample(num_samples=0))
case("a million samples", "num_samples", lambda a: a.sample(num_samples=10**6))
case("sample number -1", "seq_id", lambda a: a.sample(seq_id=-1))
case("sample number 2^63", "seq_id", lambda a: a.sample(seq_id=2**63))
case("no new tokens", "max_tokens", lambda a: a.params(max_tokens=0))
case("max_tokens -1", "max_tokens", lambda a: a.params(max_tokens=-1))
case("max_tokens beyond the context", "max_tokens", lambda a: a.params(max_tokens=10**6))
case("temperature -1", "temperature", lambda a: a.params(temperature=-1.0))
case("temperature NaN", "temperature", lambda a: a.params(temperature=float("nan")))
case("top_p 0", "top_p", lambda a: a.params(top_p=0.0))
case("top_p 1.5", "top_p", lambda a: a.params(top_p=1.5))
case("top_k 0", "top_k", lambda a: a.params(top_k=0))
case("top_k -2", "top_k", lambda a: a.params(top_k=-2))
case("stops of two kinds", "stop", lambda a: a.params(stop=[1, "a"]))
case("an empty stop", "stop", lambda a: a.params(stop=""))
case("a thousand stops", "stop", lambda a: a.params(stop=list(range(1000))))
case("sampling parameter nobody knows", "min_p", lambda a: a.params(min_p=0.1))
case("sampling parameters a list", "sampling_params", lambda a: a.sample(sampling_params=[]))
case("something not offered", "model_path", lambda a: a.sample(model_path="tinker://x"))
for _option in ("topk_sample_logprobs", "prompt_alt_tokens_k"):
    case(f"{_option} of every token", _option[:13], lambda a, _option=_option: a.sample(**{_option: 2**31 - 1}))
for _name, _target in {
    "too few rows": {"data": [1], "shape": [1, 1]},
    "no token": {"data": [-1, -1], "shape": [2, 1]},
    "a token beyond the vocabulary": {"data": [1, 2**31 - 1], "shape": [2, 1]},
    "no shape": {"data": [1, 2]},
}.items():
    case(
        f"targets: {_name}",
        "target_prompt_logprobs",
        lambda a, target=_target: a.sample(target_prompt_logprobs={"dtype": "int64", **target}),
    )
case(
    "more of the prompt than there is",
    "prompt_logprobs_last_n",
    lambda a: a.sample(prompt_logprobs=True, prompt_logprobs_last_n=3),
)
case("top-k of every token", "topk_prompt_logprobs", lambda a: a.sample(topk_prompt_logprobs=2**31 - 1))
case("sampler nobody has", "sampling session", lambda a: a.post("asample", **sample_body("s:sample:0")))
case(
    "no base model",
    "base_model",
    lambda a: a.post("create_sampling_session", session_id=a.session, sampling_session_seq_id=0),
)
_LONG = {"chunks": [{"type": "encoded_text", "tokens": [1] * 3000}]}


# --- futures and listings ---------------------------------------------------------------------------------------------

for _text in (
    "x",
    ":",
    "::",
    "a:b",
    "{run}",
    "{run}:",
    "{run}:-1",
    "{run}:1e3",
    "{run}:x",
    "{run}:99",
    "{run}:\u0661",
    "{run}:9223372036854775808",
    "{run}:9999999999999999999",
    "{run}:" + "9" * 100,
    "{run}:sample:0:1",
    "s:sample:0:1",
    "{run}:1:1",
    " {run}:1",
    "../../etc/passwd:1",
    "' OR 1=1 --:1",
):
    case(f"future {_text[:40]!a}", "unknown", lambda a, text=_text: a.poll(text.format(run=a.model)))
case("future empty", "request_id", lambda a: a.poll(""))
case("future a number", "request_id", lambda a: a.poll(5))
case("future endless", "request_id", lambda a: a.poll("x" * 100_000))
case("future with NUL", "request_id", lambda a: a.poll("a\0:1"))
for _path in ("training_runs", "checkpoints"):
    for _query in ("limit=0", "limit=-1", "limit=x", f"limit={10**30}", "offset=-1", f"offset={10**30}", "limit=1.5"):
        case(
            f"{_path}?{_query[:12]}", _query.split("=")[0], lambda a, path=_path, query=_query: a.get(f"{path}?{query}")
        )


# --- HTTP -------------------------------------------------------------------------------------------------------------

case("no such path", "", lambda a: a.get("nothing/here"))
case("no such method", "", lambda a: a.tenant.http.put("optim_step", content=b"{}"))
case("a path with a slash too many", "", lambda a: a.raw("optim_step/", b"{}"))
case("body beyond the limit", "larger than", lambda a: a.raw("forward_backward", bytes(LIMIT + 1)))
case("JSON beyond its limit", "larger than", lambda a: a.raw("optim_step", b" " * (JSON_LIMIT + 1)))
case("JSON of a session beyond its limit", "larger than", lambda a: a.raw("create_session", b" " * (JSON_LIMIT + 1)))
case("a sample beyond the limit", "larger than", lambda a: a.raw("asample", b" " * (LIMIT + 1)))
case("telemetry beyond the limit", "larger than", lambda a: a.raw("telemetry", b" " * (LIMIT + 1)))
case("body beyond the limit, in chunks", "larger than", lambda a: a.tenant.http.post("optim_step", content=_endless()))
case(
    "a length that lies", "", lambda a: a.socket(a.head("/api/v1/optim_step", f"Content-Length: {LIMIT * 1000}"), b"{}")
)
case("a length that is none", "", lambda a: a.socket(a.head("/api/v1/optim_step", "Content-Length: x") + b"{}"))
case(
    "a chunk that is none", "", lambda a: a.socket(a.head("/api/v1/optim_step", "Transfer-Encoding: chunked"), b"x\r\n")
)
case("a path of bytes", "", lambda a: a.socket(a.head("/api/v1/samplers/\xff\xfe", "Content-Length: 0")))
case("no HTTP at all", "", lambda a: a.socket(b"\x16\x03\x01\x02\x00" * 20))


def _endless() -> Iterator[bytes]:
    for _ in range(2 * LIMIT // 65536):
        yield bytes(65536)


# --- the checks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"max_request_bytes": LIMIT}
    server = Server(tmp_path_factory.mktemp("target"), mock_config(limits=limits)).start()
    yield server
    server.close()


def explanation(answer: httpx.Response, tenant: Tenant) -> str:
    """Return the message for the tenant: the detail of a 4xx response, or the message of a failed future."""
    if answer.status_code == 200:
        return tenant.error(answer.json()["request_id"])
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert int(answer.headers["content-length"]) == len(answer.content) > 0  # without a length the SDK retries
    if answer.headers["content-type"].startswith("text/plain"):  # uvicorn's answer to bytes that are not HTTP
        assert answer.text == "Invalid HTTP request received."
        return answer.text
    detail = answer.json()["detail"]
    assert isinstance(detail, str)
    return detail


@pytest.mark.parametrize("name", CASES)
def test_refused(target: Server, name: str) -> None:
    field, attack = CASES[name]
    attacker = Attacker(target, name)
    message = explanation(attack(attacker), attacker.tenant)
    assert field in message
    assert len(message) < 1500
    for secret in ("Traceback", str(target.directory), "site-packages", "/src/", attacker.tenant.key, "Error:"):
        assert secret not in message


def test_a_refusal_does_not_stop_its_model(target: Server) -> None:
    """The number of a refused call is used up, so the next one runs at once."""
    tenant = Attacker(target, "who goes on").tenant
    model = tenant.model()
    tenant.error(tenant.forward_backward(model, 1, loss="nonsense"))
    tenant.error(tenant.optim_step(model, 2, learning_rate=-1.0))
    tenant.error(tenant.save(model, 3, "../x"))
    tenant.error(tenant.forward_backward(model, 4, [datum((1, 2), mask=tensor([1]))]))
    tenant.error(tenant.optim_step(model, 5))
    assert tenant.loss(tenant.forward_backward(model, 6)) > 0
    assert "metrics" in tenant.json(tenant.optim_step(model, 7))


def test_bodies_that_end_too_early(target: Server) -> None:
    """A client that disconnects in the middle of its request does no harm."""
    attacker = Attacker(target, "who goes away")
    for sent in (b"", b'{"model_id"'):
        for ending in (socket.SHUT_RDWR, socket.SHUT_WR):
            with socket.create_connection(("127.0.0.1", target.port)) as connection:
                connection.sendall(attacker.head("/api/v1/optim_step", "Content-Length: 1000") + sent)
                connection.shutdown(ending)
    assert target.is_healthy()


def bystander(server: Server, name: str) -> list[bytes]:
    """Return all results of an honest tenant."""
    tenant = Tenant(server.url, key_for(name))
    model = tenant.model()
    requests = []
    for seq in range(1, 16, 3):
        requests += [
            tenant.forward_backward(model, seq),
            tenant.forward_backward(model, seq + 1, [datum(range(20)), datum(range(7, 40))]),
            tenant.optim_step(model, seq + 2),
        ]
    sampler = tenant.json(tenant.publish(model, 16))["sampling_session_id"]
    return [tenant.result(request) for request in (*requests, tenant.sample(sampler))]


def test_nobody_else_notices(target: Server) -> None:
    """Many of these attacks at once, while other tenants must get the same bits as on a quiet server."""
    expected = bystander(target, "bystander alone")
    over = threading.Event()
    failures: list[str] = []

    def attack(names: list[str]) -> None:
        for name in names:
            attacker = Attacker(target, f"{name} again")
            answer = CASES[name][1](attacker)
            if answer.status_code >= 500:
                failures.append(name)

    def watch(number: int) -> int:
        rounds = 0
        while not over.is_set() or rounds == 0:
            assert bystander(target, f"bystander {number} {rounds}") == expected
            rounds += 1
        return rounds

    with ThreadPoolExecutor() as pool:
        watchers = [pool.submit(watch, number) for number in range(2)]
        names = [*list(CASES)[:70], *list(CASES)[70::6]]
        attackers = [pool.submit(attack, names[part::3]) for part in range(3)]
        try:
            for attacking in attackers:
                attacking.result()
        finally:
            over.set()
        assert all(watching.result() >= 1 for watching in watchers)
    assert failures == []
    assert target.is_healthy()


def test_the_log_has_no_traceback(target: Server) -> None:
    """A tenant's mistake must not be logged as a server error."""
    log = target.log()
    for text in ("Traceback", "ERROR", "never retrieved", "tml-"):
        assert text not in log.partition("connect:")[2].partition("training =")[2], log[-5000:]


def test_a_request_is_built_as_the_sdk_builds_it() -> None:
    """The attacks above differ from this valid request only in their content."""
    request = training_request("m", 1, [datum((1, 2, 3), weights=tensor([1, 1]))])
    assert request.data[0].loss_fn_inputs["target_tokens"].shape == [2]
    assert pb.ForwardBackwardRequest.FromString(request.SerializeToString()) == request


def test_a_save_that_cannot_be_written_is_no_mistake_of_the_tenants() -> None:
    """The trainer reports where it could not write; the tenant learns only that it was not its mistake."""

    class FullDisk:
        def prepare_save(self, adapter_id: str, optimizer: bool) -> Callable[[Path], None]:
            return self.write

        def write(self, directory: Path) -> None:
            raise CheckpointError(f"could not write {directory}: no space") from OSError(errno.ENOSPC, "no space")

    class NoCheckpoints:
        async def get(self, *_: object) -> None:
            return None

    compute = Compute()
    files = DataDir(Path("/var/lib/twinkle"))
    store = SimpleNamespace(checkpoints=NoCheckpoints())
    model = SimpleNamespace(trainer=FullDisk())
    checkpoints = Checkpoints(
        SimpleNamespace(model=model, kinds=RunKinds(), store=store, compute=compute, files=files, tenants=Tenants())
    )
    run = RunRecord("s:train:0", "s", 0, "t", "mock", "mock", LoraSpec(rank=8), 0.0, 0.0)
    op = Op(run.run_id, 1, OpKind.SAVE, SaveWeights("ck"), b"")
    outcome = json.loads(asyncio.run(checkpoints.run(op, run)).body)
    compute.close()
    assert outcome["category"] == "server"
    assert "disk is full" in outcome["error"]
    assert "/var" not in outcome["error"]


def test_a_full_disk_says_nothing_of_our_directories() -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/")
    async def fail() -> None:
        raise StorageFullError(28, "no room for 5 bytes in /var/lib/twinkle/journal")

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post("/")

    answer = asyncio.run(post())
    assert answer.status_code == 507
    assert "disk is full" in answer.json()["detail"]
    assert "/var" not in answer.text
