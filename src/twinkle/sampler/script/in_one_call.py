"""Sampling in one call, from prompts to responses, with any engine: the code that the samplers of scripts share.

It runs the loop of ``submit`` and ``step`` that a server runs in its service loop. On a worker group each worker
answers its share of the inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from twinkle.data_format import SampleResponse, SamplingParams
from twinkle.errors import InvalidInputError, UnknownNameError
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.dispatch import Arguments
from twinkle.model.library.sequences import as_feature_list
from twinkle.model.trainer.trainer import Trainer
from twinkle.sampler import types as engine_types
from twinkle.sampler.script.features import as_sampling_params, engine_request, response_of

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = ["AdapterVersions", "Inputs", "Params", "ReceivesWeights", "own_prompts", "sample_in_one_call"]

Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Params = SamplingParams | Mapping[str, Any] | None

_BY_POSITION = ("inputs", "sampling_params", "adapter_name", "adapter_path")
_request_numbers = count()


class ReceivesWeights(Protocol):
    """A sampler of a script that accepts the weights of adapters, such as ``LocalSampler``."""

    def receive_weights(
        self, adapter_name: str, weights: Mapping[str, Tensor], peft_config: Mapping[str, Any]
    ) -> None: ...


def own_prompts(
    n_workers: int, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, device_mesh: DeviceMesh
) -> Arguments:
    """Return the arguments of the i-th worker: its share of the inputs.

    A seed is increased by the number of the worker's first input, so that samples equal those of a single process.
    """
    if len(args) > len(_BY_POSITION):
        raise TypeError(f"sample() takes {len(_BY_POSITION)} arguments by position, {len(args)} were given")
    given = {**dict(zip(_BY_POSITION, args, strict=False)), **kwargs}
    inputs, params = as_feature_list(given["inputs"]), given.get("sampling_params")
    place = device_mesh.get_slice(len(inputs), i)
    if params is not None:
        params = as_sampling_params(params)
        if params.seed is not None:
            params = replace(params, seed=params.seed + place.start)
    return (), {**given, "inputs": inputs[place], "sampling_params": params}


class AdapterVersions:
    """Maps the adapters of a script to versions of an engine.

    A version is either received once and kept, or made for one call from a trainer's adapter or from a directory.
    """

    def __init__(self, engine: engine_types.Sampler, trainer: Trainer) -> None:
        self._engine = engine
        self._trainer = trainer
        self._received: dict[str, str] = {}  # version ids by adapter name
        self._numbers = count()

    def receive(self, adapter_name: str, install: Callable[[str], None]) -> None:
        """Replace the adapter's version by a new one, which ``install`` adds to the engine under the id it is given."""
        version = f"{adapter_name}-{next(self._numbers)}"
        install(version)
        if adapter_name in self._received:
            self._engine.retire(self._received[adapter_name])
        self._received[adapter_name] = version

    @contextmanager
    def chosen(self, adapter_name: str | None, adapter_path: str | PathLike[str] | None) -> Iterator[str | None]:
        """Yield the adapter's received version, or one made for this call; None (the base model) if none is named."""
        if adapter_name and adapter_path is not None:
            raise InvalidInputError("adapter_path", adapter_path, f"None beside adapter_name {adapter_name!r}")
        if adapter_name and adapter_name in self._received:
            yield self._received[adapter_name]
            return
        version = f"call-{next(self._numbers)}"
        if adapter_path is not None:
            self._engine.load_version(version, fspath(adapter_path))
        elif adapter_name:
            if adapter_name not in self._trainer.adapter_ids():
                known = (*self._trainer.adapter_ids(), *self._received)
                raise UnknownNameError("adapter", adapter_name, known or ("none",))
            self._engine.publish(version, adapter_name)
        else:
            yield None
            return
        try:
            yield version
        finally:
            self._engine.retire(version)


def sample_in_one_call(
    engine: engine_types.Sampler, template: "Template", inputs: Inputs, params: SamplingParams, version: str | None
) -> list[SampleResponse]:
    """Return one response for each trajectory or feature, in the same order."""
    features = _encoded(template, as_feature_list(inputs), generation_prompt=params.max_tokens != 0)
    requests = [
        engine_request(feature, params, index, version, f"local-{next(_request_numbers)}")
        for index, feature in enumerate(features)
    ]
    results = _run(engine, requests)
    return [response_of(template, *each, params) for each in zip(features, results, strict=True)]


def _encoded(
    template: "Template", inputs: Sequence[Mapping[str, Any]], generation_prompt: bool
) -> list[Mapping[str, Any]]:
    encoded = {"input_ids" in each for each in inputs}
    if len(encoded) > 1:
        raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
    if encoded == {True}:
        return list(inputs)
    return list(template.batch_encode(inputs, add_generation_prompt=generation_prompt))


def _run(
    engine: engine_types.Sampler, requests: Sequence[engine_types.SampleRequest]
) -> list[engine_types.SampleResult]:
    """Return results in the order of the requests. Raise the first failure, and cancel all other requests then."""
    done: dict[str, engine_types.SampleResult] = {}
    try:
        for request in requests:
            engine.submit(request)
        while engine.busy:
            for event in engine.step():
                assert isinstance(event, engine_types.Finished)  # nothing is streamed
                if isinstance(event.outcome, engine_types.SampleFailure):
                    raise event.outcome.error
                done[event.request_id] = event.outcome
    finally:
        for request in requests:
            engine.cancel(request.request_id)
    return [done[request.request_id] for request in requests]
