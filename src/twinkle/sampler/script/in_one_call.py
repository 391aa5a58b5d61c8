"""Sampling in one call, from prompts to responses, with any engine: the code that the samplers of scripts share.

It runs the loop of ``submit`` and ``step`` that a server runs in its service loop. On a worker group each worker
answers its share of the inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from twinkle.model.types import VisionSpec
from twinkle.model.vision.patches import images_in_row
from twinkle.sampler import types as engine_types
from twinkle.sampler.script.features import as_sampling_params, engine_request, response_of

if TYPE_CHECKING:
    from twinkle.template import Template

__all__ = [
    "AdapterVersions",
    "Chosen",
    "Inputs",
    "Params",
    "PresentAdapters",
    "ReceivesWeights",
    "TrainerAdapters",
    "own_prompts",
    "sample_in_one_call",
]

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


class PresentAdapters(Protocol):
    """The adapters of a model of this process, with the weights that they have at the time of a call."""

    def adapter_ids(self) -> list[str]: ...

    def publish(self, version_id: str, adapter_id: str) -> None:
        """Add the adapter's present weights to the engine as a version."""
        ...


@dataclass(frozen=True)
class Chosen:
    """What a call samples with: the engine's version, None for the base model, and its name in responses."""

    version: str | None
    name: str


class TrainerAdapters:
    """The adapters of the trainer on whose model an engine runs."""

    def __init__(self, engine: engine_types.Sampler, trainer: Trainer) -> None:
        self._engine = engine
        self._trainer = trainer

    def adapter_ids(self) -> list[str]:
        return self._trainer.adapter_ids()

    def publish(self, version_id: str, adapter_id: str) -> None:
        self._engine.publish(version_id, adapter_id)


class AdapterVersions:
    """Maps the adapters of a script to versions of an engine.

    A version is either received once and kept, or made for one call from an adapter of a model or from a directory.
    """

    def __init__(self, engine: engine_types.Sampler, present: PresentAdapters) -> None:
        self._engine = engine
        self._present = present
        self._received: dict[str, str] = {}  # version ids by adapter name
        self._synced: str | None = None  # the version of the last synchronisation, if that was one of an adapter
        self._numbers = count()

    def receive(self, adapter_name: str, install: Callable[[str], None]) -> None:
        """Replace the adapter's version by a new one, which ``install`` adds to the engine under the id it is given."""
        version = f"{adapter_name}-{next(self._numbers)}"
        install(version)
        if adapter_name in self._received:
            self._engine.retire(self._received[adapter_name])
        self._received[adapter_name] = version

    def draw_with(self, version: str | None) -> None:
        """Use this version of the engine in calls that name no adapter; None: the base model."""
        if self._synced is not None:
            self._engine.retire(self._synced)
        self._synced = version

    def forget_all(self) -> None:
        """Forget all received versions, because the engine has retired them: its base model is being replaced."""
        self._received.clear()
        self._synced = None

    @contextmanager
    def chosen(
        self,
        adapter_name: str | None,
        adapter_path: str | PathLike[str] | None,
        *,
        use_base_model: bool = False,
        base_name: str = "base",
    ) -> Iterator[Chosen]:
        """Yield the adapter's received version, or one made for this call.

        If none is named, yield the version that was synchronised last; without that, or with ``use_base_model``, the
        base model, whose name is ``base_name``.
        """
        if adapter_name and adapter_path is not None and not use_base_model:
            raise InvalidInputError("adapter_path", adapter_path, f"None beside adapter_name {adapter_name!r}")
        if use_base_model or not (adapter_name or adapter_path is not None):
            synced = None if use_base_model else self._synced
            yield Chosen(synced, base_name if synced is None else synced)
            return
        if adapter_name and adapter_name in self._received:
            yield Chosen(self._received[adapter_name], self._received[adapter_name])
            return
        version = f"call-{next(self._numbers)}"
        if adapter_path is not None:
            self._engine.load_version(version, fspath(adapter_path))
        else:
            assert adapter_name
            if adapter_name not in self._present.adapter_ids():
                known = (*self._present.adapter_ids(), *self._received)
                raise UnknownNameError("adapter", adapter_name, known or ("none",))
            self._present.publish(version, adapter_name)
        try:
            yield Chosen(version, adapter_name or fspath(adapter_path or ""))
        finally:
            self._engine.retire(version)


def sample_in_one_call(
    engine: engine_types.Sampler,
    template: "Template",
    inputs: Inputs,
    params: SamplingParams,
    chosen: Chosen,
    vision: VisionSpec | None = None,
) -> list[SampleResponse]:
    """Return one response for each trajectory or feature, in the same order.

    vision: what the model wants of images; None: it reads text only.
    """
    features = _encoded(template, as_feature_list(inputs), generation_prompt=params.max_tokens != 0)
    images = [images_in_row(each, vision, field=f"inputs[{index}]") for index, each in enumerate(features)]
    requests = [
        engine_request(feature, params, index, chosen.version, f"local-{next(_request_numbers)}", images=images[index])
        for index, feature in enumerate(features)
    ]
    results = _run(engine, requests)
    responses = [response_of(template, *each, params) for each in zip(features, results, strict=True)]
    return [replace(response, weights_version=chosen.name) for response in responses]


def _encoded(
    template: "Template", inputs: Sequence[Mapping[str, Any]], generation_prompt: bool
) -> list[Mapping[str, Any]]:
    encoded = {"input_ids" in each for each in inputs}
    if len(encoded) > 1:
        raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
    if encoded == {True}:
        return [template.add_images(each) for each in inputs]
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
