"""The library's Trainer, over the requests of Tinker's protocol in JSON: passes and steps of named adapters.

All items of a call are submitted before the first result is waited for, so the server can compute them in one batch, as
the library's trainer does.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinkle_client.client.current import default_client
from twinkle_client.client.json_body import encode
from twinkle_client.client.log_lines import left_to_server
from twinkle_client.client.session import TwinkleClient
from twinkle_client.errors import InvalidRequestError, ServerError, TwinkleClientError, invalid, unknown
from twinkle_client.model.downloads import check_target, download_checkpoint
from twinkle_client.remote import id_text, model_name

__all__ = ["AdamParams", "Datum", "LoraSpec", "TrainFailure", "TrainItem", "TrainResult", "Trainer"]

FloatArray = NDArray[np.float32]

_ALPHA = 32.0  # of all adapters in Tinker's protocol
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class LoraSpec:
    """The shape of one adapter, with the fields of the library's class.

    The server's requests carry rank, seed and the three switches; ``alpha`` is 32 and ``target_modules`` None there.
    """

    rank: int
    alpha: float = _ALPHA
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    target_modules: Sequence[str] | str | None = None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdamParams:
    """Hyper-parameters of one AdamW step; all of them may change from step to step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0 = no clipping


@dataclass(frozen=True)
class Datum:
    """One sequence: ``targets[i]`` is predicted from ``tokens[: i + 1]``. ``extras``: further inputs of the loss.

    tokens (T,) · targets (T,) or (T, K) · weights like targets.
    """

    tokens: ArrayLike
    targets: ArrayLike
    weights: ArrayLike | None = None
    extras: Mapping[str, ArrayLike] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainItem:
    """One request: some sequences, one of the server's losses, one adapter.

    The last four fields are the library's. A server takes only their defaults.
    """

    adapter_id: str
    data: Sequence[Datum]
    loss: str = "cross_entropy"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    objective: object = None
    temperature: float = 1.0
    statistics: bool = False
    base_model: bool = False


@dataclass(frozen=True)
class TrainResult:
    """The result of one item: log-probabilities of the targets, one array per datum, and metrics ``name:reduction``."""

    logprobs: list[FloatArray]
    metrics: dict[str, float]
    values: tuple[()] = ()


@dataclass(frozen=True)
class TrainFailure:
    """The reason why one item failed. Its gradient was discarded, and other items were not affected."""

    error: TwinkleClientError


@dataclass
class _Adapter:
    model_id: str  # the server's name of the adapter
    seq_id: int = 0  # of its last op


class Trainer:
    """Many LoRA adapters on one model of a server. Threads must not share it.

    It has the library's methods for adapters, passes, steps and saving. State that stays inside the server's trainer
    (gradients, snapshots, frozen versions) is out of reach.
    """

    def __init__(self, model_id: str | os.PathLike[str], *, client: TwinkleClient | None = None) -> None:
        self.model_id = id_text(model_id)
        self.client = default_client() if client is None else client
        self._base_model = model_name(model_id)
        self._adapters: dict[str, _Adapter] = {}

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        *,
        device: object = None,
        dtype: object = None,
        memory_budget_bytes: int | None = None,
        max_tokens_per_batch: int | None = None,
        compiled: bool | None = None,
        device_mesh: object = None,
        reshard_after_forward: bool | None = None,
        client: TwinkleClient | None = None,
    ) -> "Trainer":
        """Return a trainer for a model that the server has. The other options are the server's decision."""
        left_to_server(
            "Trainer",
            device=device,
            dtype=dtype,
            memory_budget_bytes=memory_budget_bytes,
            max_tokens_per_batch=max_tokens_per_batch,
            compiled=compiled,
            device_mesh=device_mesh,
            reshard_after_forward=reshard_after_forward,
        )
        return cls(model_id, client=client)

    def create_adapter(self, adapter_id: str, spec: LoraSpec) -> LoraSpec:
        """Make a new adapter and return its spec. Without a seed the server draws one, which it does not return."""
        if adapter_id in self._adapters:
            raise invalid("adapter_id", adapter_id, "a name that no adapter of this trainer has")
        if spec.alpha != _ALPHA:
            raise invalid("alpha", spec.alpha, f"{_ALPHA:g}; add_adapter_to_model of a model takes any lora_alpha")
        if spec.target_modules is not None:
            allowed = "None; add_adapter_to_model of a model takes target_modules"
            raise invalid("target_modules", spec.target_modules, allowed)
        config = {name: value for name, value in asdict(spec).items() if name not in ("alpha", "target_modules")}
        body = {
            "session_id": self.client.session_id,
            "model_seq_id": self.client.next_model_number(),
            "base_model": self._base_model,
            "lora_config": {name: value for name, value in config.items() if value is not None},
        }
        made = self._result(self._submit("create_model", body))
        self._adapters[adapter_id] = _Adapter(str(made["model_id"]))
        return spec

    def remove_adapter(self, adapter_id: str) -> None:
        """Evict an adapter; the server keeps its last state as a checkpoint for a while."""
        adapter = self._adapter(adapter_id)
        self._result(self._submit("unload_model", {"model_id": adapter.model_id}))
        del self._adapters[adapter_id]

    def adapter_ids(self) -> list[str]:
        return list(self._adapters)

    def forward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        """Return the losses and log-probabilities of all items, without gradients."""
        return self._passes("forward", items)

    def forward_backward(self, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        """Add the gradients of all items to those of their adapters, and return losses and log-probabilities."""
        return self._passes("forward_backward", items)

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        """Take an AdamW step with the gradient accumulated since the last one, and return the server's metrics."""
        body = {"adam_params": {name: float(value) for name, value in asdict(params).items()}}
        answer = self._result(self._submit_op("optim_step", adapter_id, body))
        return {name: float(value) for name, value in (answer.get("metrics") or {}).items()}

    def save(self, adapter_id: str, directory: str | Path, optimizer: bool = True, overwrite: bool = False) -> None:
        """Save an adapter on the server and download its files to ``directory``, in PEFT's format.

        overwrite: replace a directory that exists already, if it is empty or has adapter_config.json. The server always
        saves the optimizer's state too.
        """
        folder = Path(directory)
        if folder.exists() and not overwrite:
            raise invalid("directory", str(directory), "a directory that does not exist yet, or overwrite=True")
        if not optimizer:
            raise invalid("optimizer", optimizer, "True: the server saves the optimizer's state with the weights")
        check_target(folder, "directory")
        name = _NOT_IN_A_NAME.sub("_", folder.name).lstrip(".")[:100] or "saved"
        saved = self._result(self._submit_op("save_weights", adapter_id, {"path": name, "overwrite": True}))
        download_checkpoint(self.client, str(saved["path"]), folder, "directory")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _passes(self, route: str, items: Sequence[TrainItem]) -> list[TrainResult | TrainFailure]:
        for item in items:
            _check(item)
            self._adapter(item.adapter_id)
        waiting = [self._submit_op(route, item.adapter_id, {f"{route}_input": _wire(item)}) for item in items]
        return [self._outcome(request_id) for request_id in waiting]

    def _outcome(self, request_id: str) -> TrainResult | TrainFailure:
        try:
            answer = self._result(request_id)
        except (InvalidRequestError, ServerError) as error:
            return TrainFailure(error)
        logprobs = [_array(output["logprobs"]) for output in answer["loss_fn_outputs"]]
        return TrainResult(logprobs, {name: float(value) for name, value in answer["metrics"].items()})

    def _submit_op(self, route: str, adapter_id: str, body: Mapping[str, Any]) -> str:
        adapter = self._adapter(adapter_id)
        numbered = {**body, "model_id": adapter.model_id, "seq_id": adapter.seq_id + 1}
        request_id = self._submit(route, numbered)
        adapter.seq_id += 1  # only now: a refused request has used no number
        return request_id

    def _submit(self, route: str, body: Mapping[str, Any]) -> str:
        return str(self.client.post(f"/{route}", encode(body))["request_id"])

    def _result(self, request_id: str) -> dict[str, Any]:
        """Wait for a result, however long it takes, and return it; raise the error if the request failed."""
        answer = self.client.wait_for("/retrieve_future", encode({"request_id": request_id}))
        if "error" not in answer:
            return dict(answer)
        if answer.get("category") == "user":
            raise InvalidRequestError(str(answer["error"]))
        raise ServerError(200, str(answer["error"]), self.client.base_url)

    def _adapter(self, adapter_id: str) -> _Adapter:
        if adapter_id not in self._adapters:
            raise unknown("adapter", adapter_id, self._adapters)
        return self._adapters[adapter_id]


def _check(item: TrainItem) -> None:
    """Raise if an item has settings that a server's requests do not carry."""
    plain = replace(item, objective=None, temperature=1.0, statistics=False, base_model=False)
    for name in ("objective", "temperature", "statistics", "base_model"):
        value, default = getattr(item, name), getattr(plain, name)
        if value != default:
            raise invalid(name, value, f"{default!r}: a server's trainer computes its own losses at temperature 1")


def _wire(item: TrainItem) -> dict[str, Any]:
    body: dict[str, Any] = {"data": [_datum(datum) for datum in item.data], "loss_fn": item.loss}
    if item.loss_config:
        body["loss_fn_config"] = {name: float(value) for name, value in item.loss_config.items()}
    return body


def _datum(datum: Datum) -> dict[str, Any]:
    inputs = {"target_tokens": _tensor(datum.targets, np.int64)}
    if datum.weights is not None:
        inputs["weights"] = _tensor(datum.weights, np.float32)
    inputs |= {name: _tensor(values, np.float32) for name, values in datum.extras.items()}
    tokens = np.asarray(datum.tokens, np.int64).tolist()
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}, "loss_fn_inputs": inputs}


def _tensor(values: ArrayLike, dtype: type[np.generic]) -> dict[str, Any]:
    array = np.asarray(values, dtype)
    return {"data": array.ravel().tolist(), "dtype": array.dtype.name, "shape": list(array.shape)}


def _array(tensor: Mapping[str, Any]) -> FloatArray:
    values: FloatArray = np.array(tensor["data"], np.float32)
    return values if tensor.get("shape") is None else values.reshape(tensor["shape"])
