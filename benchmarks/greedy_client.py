"""A tenant that sends valid but greedy requests: as many, as large and as expensive as the protocol allows.

Nothing here is malformed. The client sends wide and sparse targets, bodies that unpack to far more than was sent,
custom losses, many long samples, batches by reference, results as JSON, new templates and large metadata, all at once
and for a given time. An answer is expected to be a success or a refusal that names its limit or field; all others go
into :attr:`Tally.unexplained`. All random draws come from one seed. Used by `make fuzz` and by tenant_isolation.py.
"""

import asyncio
import contextlib
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import zstandard

from twinkle.server.wire import tinker_pb2 as pb

__all__ = ["GreedyClient", "Tally", "greedy"]

_WORKERS = 8  # requests in flight at a time
_PATIENCE = 20.0  # seconds to wait for one result before giving up on it
_REFUSALS = (400, 404, 406, 409, 410, 413, 422, 429, 431, 503, 507)
_WIDTHS = (1, 2, 16, 256, 1024, 4096, 2**16, 2**20, 2**22)
_LENGTHS = (1, 4, 32, 128, 299, 1000)


@dataclass
class Tally:
    """Counts of what a greedy client sent and of the answers it got."""

    sent: Counter[str] = field(default_factory=Counter)  # by kind of request
    answers: Counter[int] = field(default_factory=Counter)  # by status
    refused: Counter[str] = field(default_factory=Counter)  # by the beginning of the text
    failed: Counter[str] = field(default_factory=Counter)  # failed futures, by the beginning of the text
    unexplained: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sent = ", ".join(f"{kind} {count}" for kind, count in sorted(self.sent.items()))
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(self.answers.items()))
        reasons = "\n".join(f"  {count:5d} {text}" for text, count in (self.refused + self.failed).most_common(30))
        return f"sent: {sent}\nanswers: {answers}\nrefusals:\n{reasons}"


class GreedyClient:
    """One tenant with a session, a few adapters and a sampler. Belongs to one event loop."""

    def __init__(self, url: str, key: str, model: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tally = Tally()
        self._model = model
        self._http = httpx.AsyncClient(
            base_url=f"{url}/api/v1/",
            headers={"X-API-Key": key},
            timeout=120,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._session = ""
        self._adapters: list[str] = []
        self._seqs: dict[str, int] = {}
        self._refused: list[tuple[str, int]] = []  # adapters and refused sequence numbers, to be used again
        self._sampler = ""
        self._samples = 0
        self._losses: list[str] = []
        self._results: list[str] = []
        self._loader: str | None = None
        self._native = ""
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "wide targets": (3, self._wide_targets),
            "sparse targets": (3, self._sparse_targets),
            "compressed": (2, self._compressed),
            "custom loss": (2, self._custom_loss),
            "samples": (3, self._many_samples),
            "by reference": (2, self._by_reference),
            "JSON fetch": (3, self._json_fetch),
            "template": (1, self._template),
            "metadata": (1, self._metadata),
            "step": (2, self._step),
        }

    async def run(self, seconds: float) -> Tally:
        """Send requests for this many seconds, from several workers."""
        until = time.monotonic() + seconds
        try:
            await self._begin()
            await asyncio.gather(*(self._work(until) for _ in range(_WORKERS)), self._beat(until))
        finally:
            await self._http.aclose()
        return self.tally

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._session = (await self._json("create_session", {"tags": ["greedy"]}))["session_id"]
        for number in range(3):
            lora = {"rank": self.draw.choice((8, 32, 128)), "seed": number}
            body = {"session_id": self._session, "model_seq_id": number, "base_model": self._model, "lora_config": lora}
            made = await self._json("create_model", body)
            if "model_id" in made:
                self._adapters.append(made["model_id"])
                self._seqs[made["model_id"]] = 0
        body = {"session_id": self._session, "sampling_session_seq_id": 0, "base_model": self._model}
        self._sampler = (await self._json("create_sampling_session", body)).get("sampling_session_id", "")

    async def _work(self, until: float) -> None:
        names = list(self._kinds)
        weights = [self._kinds[name][0] for name in names]
        while time.monotonic() < until:
            name = self.draw.choices(names, weights)[0]
            self.tally.sent[name] += 1
            try:
                await self._kinds[name][1]()
            except httpx.TimeoutException:
                self.tally.unexplained.append(f"{name}: no answer within 120 s")
            except httpx.HTTPError as error:
                self.tally.unexplained.append(f"{name}: {type(error).__name__} {error}")
                await asyncio.sleep(1)  # do not flood a dead server with retries

    async def _beat(self, until: float) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):  # the workers record errors
                await self._post("session_heartbeat", {"session_id": self._session})
                if self._native:
                    await self._post("twinkle/session_heartbeat", {"session_id": self._native})
            await asyncio.sleep(min(10.0, max(until - time.monotonic(), 0.0)))

    # --- kinds of requests --------------------------------------------------------------------------------------------

    async def _wide_targets(self) -> None:
        width, length = self.draw.choice(_WIDTHS[:7]), self.draw.choice(_LENGTHS)
        while width * length > 2**20:
            length = max(1, length // 2)
            width = width if length > 1 else 2**20
        targets = np.ones((length, width), "<i8")
        inputs = {"target_tokens": _dense(targets), "weights": _dense(np.full((length, width), 0.1, "<f4"))}
        await self._train([_datum(length, inputs)] * self.draw.choice((1, 1, 4)))

    async def _sparse_targets(self) -> None:
        """Train on a wide, short datum, and in half of the cases also on a long one."""
        width, rows = self.draw.choice(_WIDTHS), self.draw.choice((1, 8, 64))
        listed = self.draw.choice((0, 1, 4))
        wide = {"target_tokens": _sparse(rows, width, listed, "<i8"), "weights": _sparse(rows, width, listed, "<f4")}
        data = [_datum(rows, wide)]
        if self.draw.random() < 0.5:
            length = self.draw.choice(_LENGTHS)
            data.append(_datum(length, {"target_tokens": _dense(np.ones(length, "<i8"))}))
        await self._train(data)

    async def _compressed(self) -> None:
        """Send a few kilobytes that unpack to megabytes."""
        size = self.draw.choice((2**20, 2**23, 2**26, 2**27))
        length = 64
        inputs = {"target_tokens": _dense(np.ones(length, "<i8"))}
        place = self._next()
        body = self._training_body(place, [_datum(length, inputs)]) + _field_nobody_knows(size)
        pack = self.draw.choice(("gzip", "zstd"))
        packed = gzip.compress(body, 1) if pack == "gzip" else zstandard.compress(body, 1)
        await self._asked("forward_backward", packed, place=place, encoding=pack)

    async def _custom_loss(self) -> None:
        if len(self._losses) < 5:
            number = len(self._losses)
            self._losses.append("")
            answer = await self._json(
                "create_custom_loss", _loss(self._session, number, self.draw.choice((4, 40, 400)))
            )
            made = await self._result(answer.get("request_id", ""))
            self._losses[number] = str(made.get("loss_id", "")) if isinstance(made, dict) else ""
        loss = self.draw.choice(self._losses)
        if loss:
            length = self.draw.choice((32, 299, 1000))
            inputs = {"target_tokens": _dense(np.ones(length, "<i8")), "scale": _dense(np.ones(length, "<f4"))}
            config = {"loss_id": pb.LossConfigValue(text=loss)}
            data = [_datum(length, inputs)] * self.draw.choice((1, 8))
            await self._train(data, loss_fn="custom", loss_fn_config_v2=config)

    async def _many_samples(self) -> None:
        self._samples += 1
        prompt = [3 + self.draw.randrange(90) for _ in range(self.draw.choice((1, 60, 400)))]
        params = {"max_tokens": self.draw.choice((16, 100, 1000)), "seed": self._samples, "stop": []}
        body: dict[str, Any] = {
            "sampling_session_id": self._sampler,
            "seq_id": self._samples,
            "num_samples": self.draw.choice((1, 16, 128, 1024)),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": params,
        }
        if self.draw.random() < 0.3:
            body |= {"prompt_logprobs": True, "topk_prompt_logprobs": self.draw.choice((1, 20))}
        await self._asked("asample", json.dumps(body).encode(), fetch=self.draw.random() < 0.3)

    async def _by_reference(self) -> None:
        """Run a pass on rows that a processor made large, by reference. Does nothing on servers without processors."""
        if self._loader is None:
            self._loader = ""
            await self._native_verb(
                "add_adapter_to_model", adapter_name="a", config={"r": 8, "target_modules": "all-linear"}
            )
            await self._native_verb("set_template", adapter_name="a", template_cls="Template", model_id=self._model)
            text = "x" * self.draw.choice((10_000, 300_000))
            rows = [{"messages": [{"role": "user", "content": text}]} for _ in range(3)]
            meta = {"dataset_id": "", "subset_name": "default", "split": "train", "data_slice": None, "data": rows}
            meta["_TWINKLE_TYPE_"] = "DatasetMeta"
            dataset = await self._process(
                "create", processor_type="dataset", class_type="Dataset", dataset_meta=json.dumps(meta)
            )
            if "processor_id" in dataset:
                loader = await self._process(
                    "create",
                    processor_type="dataloader",
                    class_type="DataLoader",
                    dataset=dataset["processor_id"],
                    batch_size=self.draw.choice((1, 64)),
                )
                self._loader = str(loader.get("processor_id", ""))
        if self._loader:
            call = {"processor_id": self._loader}
            await self._process("call", function="__iter__", **call)
            batch = await self._process("call", function="__next__", by_reference=True, **call)
            if "result" in batch:
                await self._native_verb("forward_only", adapter_name="a", inputs=batch["result"])

    async def _json_fetch(self) -> None:
        """Fetch one of the last results again, as JSON."""
        if self._results:
            request_id = self.draw.choice(self._results[-20:])
            await self._result(request_id, accept="application/json")

    async def _template(self) -> None:
        headers = {"X-Twinkle-Session-Id": await self._native_session()}
        body = {"template_cls": "Template", "default_system": "s" * self.draw.choice((1, 1000, 20_000))}
        answer = await self._http.post(f"sampler/{self._model}/twinkle/set_template", json=body, headers=headers)
        self._note("template", answer)

    async def _metadata(self) -> None:
        """Create a session with large metadata and end it at once."""
        body = {
            "tags": ["t" * self.draw.choice((10, 200, 4000))] * self.draw.choice((1, 30, 100)),
            "user_metadata": {"m": "é" * self.draw.choice((100, 2500, 20_000))},
        }
        answer = await self._json("create_session", body)
        if "session_id" in answer:
            end = {"reason": {"type": "errored"}, "detail": "d" * 60_000}
            await self._post(f"sessions/{answer['session_id']}/finish", end)

    async def _step(self) -> None:
        place = self._next()
        body = {"model_id": place[0], "seq_id": place[1], "adam_params": {"learning_rate": 1e-4}}
        await self._asked("optim_step", json.dumps(body).encode(), place=place)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[str, int]:
        """Return an adapter and its next sequence number. Refused numbers come first: later ops wait for them."""
        if self._refused:
            return self._refused.pop(0)
        adapter = self.draw.choice(self._adapters)
        self._seqs[adapter] += 1
        return adapter, self._seqs[adapter]

    def _training_body(self, place: tuple[str, int], data: list[pb.Datum], **fields: Any) -> bytes:
        fields = {"loss_fn": "cross_entropy", "forward_only": self.draw.random() < 0.5, **fields}
        request = pb.ForwardBackwardRequest(model_id=place[0], seq_id=place[1], data=data, **fields)
        return request.SerializeToString()

    async def _train(self, data: list[pb.Datum], **fields: Any) -> None:
        place = self._next()
        body = self._training_body(place, data, **fields)
        await self._asked("forward_backward", body, fetch=self.draw.random() < 0.4, place=place)

    async def _asked(
        self,
        path: str,
        body: bytes,
        *,
        fetch: bool = False,
        place: tuple[str, int] | None = None,
        encoding: str = "identity",
    ) -> None:
        kind = "application/json" if body[:1] == b"{" else "application/x-protobuf"
        headers = {"Content-Type": kind, "Content-Encoding": encoding}
        answer = await self._http.post(path, content=body, headers=headers)
        self._note(path, answer)
        if answer.status_code != 200 and place is not None:
            self._refused.append(place)
        if answer.status_code == 200:
            request_id = answer.json()["request_id"]
            self._results.append(request_id)
            if fetch:
                await self._result(request_id)

    async def _result(self, request_id: str, accept: str = "application/x-protobuf") -> Any:
        """Return the result of a future, or None if it takes too long. Records failed futures."""
        until = time.monotonic() + _PATIENCE
        while request_id and time.monotonic() < until:
            answer = await self._http.post(
                "retrieve_future", json={"request_id": request_id}, headers={"Accept": accept}
            )
            if answer.status_code == 408:
                continue
            self._note("retrieve_future", answer)
            content = answer.content
            if answer.status_code == 200 and content[:1] == b"{" and len(content) < 2**20:
                result = json.loads(content)
                if "error" in result:
                    self._note_failure(str(result["error"]), str(result.get("category")))
                return result
            return None
        return None

    async def _native_verb(self, verb: str, **body: Any) -> None:
        headers = {"X-Twinkle-Session-Id": await self._native_session()}
        answer = await self._http.post(f"model/{self._model}/twinkle/{verb}", json=body, headers=headers)
        self._note(verb, answer)

    async def _process(self, verb: str, **body: Any) -> dict[str, Any]:
        headers = {"X-Twinkle-Session-Id": await self._native_session()}
        answer = await self._http.post(f"processor/twinkle/{verb}", json=body, headers=headers)
        self._note("processor", answer)
        return dict(answer.json()) if answer.status_code == 200 else {}

    async def _native_session(self) -> str:
        while self._native == "":
            made = await self._json("twinkle/create_session", {"metadata": None})
            self._native = self._native or str(made.get("session_id", "none"))
        return self._native

    async def _json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._post(path, body)
        return dict(answer.json()) if answer.status_code == 200 else {}

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        answer = await self._http.post(path, json=body)
        self._note(path, answer)
        return answer

    def _note(self, what: str, answer: httpx.Response) -> None:
        self.tally.answers[answer.status_code] += 1
        if answer.status_code < 400 or answer.status_code == 408:
            return
        text = answer.text[:2000]
        if answer.status_code not in _REFUSALS or not _names_something(text):
            self.tally.unexplained.append(f"{what}: {answer.status_code} {text[:300]}")
        self.tally.refused[f"{answer.status_code} {_beginning(text)}"] += 1

    def _note_failure(self, text: str, category: str) -> None:
        if category != "user" or not _names_something(text):
            self.tally.unexplained.append(f"future: {category} {text[:300]}")
        self.tally.failed[_beginning(text)] += 1


async def greedy(url: str, key: str, model: str, seed: int, seconds: float) -> Tally:
    """Run a greedy client for ``seconds`` and return its tally."""
    return await GreedyClient(url, key, model, seed).run(seconds)


# --- parts of requests ------------------------------------------------------------------------------------------------


def _names_something(text: str) -> bool:
    """Return whether a refusal names its reason (a field, a limit or a request) and not just an internal error."""
    return ":" in text and "internal error" not in text


def _beginning(text: str) -> str:
    """Return the beginning of a text without numbers and ids, enough to tell reasons apart."""
    words = text.removeprefix('{"detail":"').split(" ")
    return " ".join("…" if any(char.isdigit() for char in word) else word for word in words)[:100]


def _datum(length: int, inputs: dict[str, pb.Tensor]) -> pb.Datum:
    text = pb.EncodedTextChunk(tokens=(np.arange(length) % 90 + 3).astype("<i4").tobytes())
    return pb.Datum(model_input=[pb.Chunk(encoded_text=text)], loss_fn_inputs=inputs)


def _dense(array: np.ndarray) -> pb.Tensor:
    kind = pb.DTYPE_FLOAT32 if array.dtype.kind == "f" else pb.DTYPE_INT64
    return pb.Tensor(dense=array.tobytes(), dtype=kind, shape=array.shape)


def _sparse(rows: int, columns: int, listed: int, dtype: str) -> pb.Tensor:
    """Return a sparse tensor with ``listed`` values in each row."""
    listed = min(listed, columns)
    csr = pb.SparseCsr(
        values=np.ones(rows * listed, dtype).tobytes(),
        crow_indices=(np.arange(rows + 1) * listed).astype("<i8").tobytes(),
        col_indices=np.tile(np.arange(listed), rows).astype("<i8").tobytes(),
    )
    kind = pb.DTYPE_FLOAT32 if dtype == "<f4" else pb.DTYPE_INT64
    return pb.Tensor(sparse_csr=csr, dtype=kind, shape=(rows, columns))


def _field_nobody_knows(size: int) -> bytes:
    """Return zeros in an unknown protobuf field, which readers skip. They compress to a thousandth of their size."""
    tag, length = (1000 << 3) | 2, size
    encoded = bytearray()
    for number in (tag, length):
        while number > 127:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded) + bytes(size)


def _loss(session: str, number: int, operations: int) -> dict[str, Any]:
    """Return a request for a custom loss with this many operations per token."""

    def call(name: str, target: str, *args: Any, op: str = "call_function") -> dict[str, Any]:
        return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}

    nodes = [call(name, name, op="placeholder") for name in ("logprobs", "scale")]
    nodes.append(call("x0", "operator.mul", {"ref": "scale"}, {"ref": "logprobs"}))
    for place in range(operations):
        nodes.append(call(f"x{place + 1}", "tanh", {"ref": f"x{place}"}, op="call_method"))
    nodes.append(call("total", "sum", {"ref": f"x{operations}"}, op="call_method"))
    output = {"tuple": [{"ref": "total"}, {"dict": {"custom/x:sum": {"ref": "total"}}}]}
    nodes.append(call("output", "output", output, op="output"))
    return {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": f"greedy {operations}",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "scale", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
        "type": "create_custom_loss",
    }
