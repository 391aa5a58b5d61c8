"""Sampling in our own protocol, below HTTP: inputs, the session's template, the weights that are meant, the answer."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from twinkle.data_format import SampledSequence, SamplingParams
from twinkle.errors import InvalidInputError, NotFoundError
from twinkle.model.types import IntArray
from twinkle.sampler.features import engine_request, refuse_unsupported, response_of, sequence_of
from twinkle.sampler.types import SampleRequest, SampleResult
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.text_codec import TextCodec, text_groups
from twinkle.server.gateway.gateway import Gateway, Services
from twinkle.server.gateway.sampling_targets import SAMPLED_KINDS, Target, of_base_model, of_checkpoint, of_live_run
from twinkle.server.ids import CheckpointPath, native_run_id
from twinkle.server.protocols.openai.choices import Choice
from twinkle.server.services.sampling.sampler_service import SamplerService
from twinkle.server.state.store import Store
from twinkle.server.tenancy.work_pools import FairPool
from twinkle.server.types import SamplingSessionRecord, SessionRecord
from twinkle.server.verbs.templates import SamplingTemplate, TemplateChoice
from twinkle.server.wire.fields import MAX_STOP_LENGTH, MAX_STOPS
from twinkle_client.protocol.base import SESSION_HEADER
from twinkle_client.protocol.sampling import SampledSequenceModel, SampleResponseModel

Row = Mapping[str, Any]

MAX_INPUTS = 4096
MAX_SEQUENCES = 4096  # of all inputs together
# Columns that grow with the tokens; None in one of them is a column that is not there.
_COLUMNS = ("labels", "completion_mask", "mm_token_type_ids")


def sampling_params(given: Mapping[str, Any] | None, num_samples: int | None) -> SamplingParams:
    """Read the fields of SamplingParams by name; ``num_samples`` beside them counts where they have none."""
    named = dict(given or {})
    if named.get("num_samples") is None:
        named["num_samples"] = 1 if num_samples is None else num_samples
    params = SamplingParams.from_dict(named)
    refuse_unsupported(params)
    stops = [*params.stop_strings, *params.stop_token_ids]
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in params.stop_strings):
        allowed = f"at most {MAX_STOPS} texts or token ids; texts of 1 to {MAX_STOP_LENGTH} characters"
        raise InvalidInputError("stop", stops[:8], allowed)
    return params


def encoded(inputs: object, template: SamplingTemplate, params: SamplingParams, most_characters: int) -> list[Row]:
    """Return a feature for each input, in order. In a thread: tokenising takes a while.

    ``most_characters``: of one conversation.
    """
    rows = _rows(inputs)
    if len(rows) * params.num_samples > MAX_SEQUENCES:
        allowed = f"{MAX_SEQUENCES} sequences in all, here for each of {len(rows)} inputs"
        raise InvalidInputError("num_samples", params.num_samples, allowed)
    kinds = {"input_ids" in row for row in rows}
    if len(kinds) > 1:
        raise InvalidInputError("inputs", "some encoded and some not", "InputFeatures or Trajectories, not both")
    if kinds == {True}:
        return [_feature(row, f"inputs[{index}]") for index, row in enumerate(rows)]
    for index, row in enumerate(rows):
        if not isinstance(row.get("messages"), list):
            raise InvalidInputError(f"inputs[{index}]", sorted(row), "input_ids, or a list of messages")
    prompted = params.max_tokens != 0
    groups = text_groups(rows, most_characters)
    features = [feature for group in groups for feature in template.batch_encode(group, add_generation_prompt=prompted)]
    if len(features) != len(rows):
        left = f"{len(rows)} trajectories, of which the template leaves {len(features)}"
        raise InvalidInputError("inputs", left, "conversations that are not longer than the template's max_length")
    return list(features)


def _rows(inputs: object) -> list[Row]:
    rows = [inputs] if isinstance(inputs, dict) else inputs
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_INPUTS:
        allowed = f"an InputFeature or Trajectory, or a list of 1 to {MAX_INPUTS}"
        raise InvalidInputError("inputs", rows if not isinstance(rows, list) else f"{len(rows)} of them", allowed)
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidInputError(f"inputs[{index}]", row, "an InputFeature or Trajectory")
    return rows


def _feature(row: Row, field: str) -> Row:
    """Return the row with its columns as arrays, (T,) each, and all its other keys untouched."""
    tokens = _integers(row["input_ids"], f"{field}.input_ids")
    columns = {"input_ids": tokens}
    for name in _COLUMNS:
        if row.get(name) is not None:
            columns[name] = _integers(row[name], f"{field}.{name}")
            if len(columns[name]) != len(tokens):
                allowed = f"{len(tokens)}, one for each of input_ids"
                raise InvalidInputError(f"{field}.{name}", f"{len(columns[name])} numbers", allowed)
    messages = row.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise InvalidInputError(f"{field}.messages", messages, "a list of messages")
    others = {key: value for key, value in row.items() if key not in _COLUMNS or value is not None}
    return {**others, **columns}


def _integers(values: object, field: str) -> IntArray:
    allowed = "a list of at least one 64-bit integer"
    if not isinstance(values, list):
        raise InvalidInputError(field, values, allowed)
    try:
        column = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise InvalidInputError(field, values[:8], allowed) from None
    if column.ndim != 1 or not column.size or column.dtype.kind != "i":
        raise InvalidInputError(field, values[:8], allowed)
    return column.astype(np.int64)


def plain(value: object) -> object:
    """Return a value with arrays as lists, all the way down: what JSON can hold."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each) for each in value]
    return value


# In the user_metadata of a session: choices by the name of the model.
TEMPLATES_KEY = "twinkle.sampler_templates"


def chosen_template(session: SessionRecord | None, model: ServedModel) -> TemplateChoice:
    """Return the template that a session samples with; the plain one where none was chosen."""
    choices = {} if session is None else session.user_metadata.get(TEMPLATES_KEY, {})
    assert isinstance(choices, Mapping), "we wrote it"
    choice = choices.get(model.name)
    return TemplateChoice() if choice is None else TemplateChoice.model_validate(choice)


async def choose_template(store: Store, session: SessionRecord, model: ServedModel, choice: TemplateChoice) -> None:
    await store.sessions.note(session.session_id, TEMPLATES_KEY, model.name, choice.model_dump())


async def target_of(
    gateway: Gateway,
    services: Services,
    tenant_id: str,
    session: SessionRecord | None,
    adapter_uri: str | None,
    adapter_name: str | None,
) -> Target:
    """Return the weights that a request means. ``session``: that of its header, None where it has none."""
    if adapter_uri:
        return await _addressed(gateway, services, tenant_id, adapter_uri)
    if not adapter_name:
        return of_base_model(gateway, services, tenant_id, services.model.name)
    if session is None:
        raise InvalidInputError(f"{SESSION_HEADER} header", None, f"the session of adapter {adapter_name!r}")
    return await _live(gateway, services, tenant_id, session, adapter_name)


async def _addressed(gateway: Gateway, services: Services, tenant_id: str, uri: str) -> Target:
    path = CheckpointPath.parse(uri, "adapter_uri")
    if path.kind not in SAMPLED_KINDS:
        raise InvalidInputError("adapter_uri", uri, f"a checkpoint of kind {' or '.join(SAMPLED_KINDS)}")
    target = await of_checkpoint(gateway, await gateway.checkpoint(path, tenant_id), tenant_id)
    if target.services is not services:
        raise InvalidInputError("adapter_uri", uri, f"a checkpoint of {services.model.name}")
    return target


async def _live(gateway: Gateway, services: Services, tenant_id: str, session: SessionRecord, name: str) -> Target:
    run = services.training.run(native_run_id(session.session_id, name))
    live = None if run is None or run.tenant_id != tenant_id else await of_live_run(gateway, run, tenant_id)
    if live is None:
        raise NotFoundError("adapter", name)
    return live


_CELL_BYTES = 28  # of a token and its log-probability in JSON, about


@dataclass(frozen=True)
class FeatureSampling:
    """A request that is ready to run. Its answer has at most ``most_bytes`` and is written in a thread of ``text``."""

    request_id: str
    text: FairPool
    sampling: SamplerService
    session: SamplingSessionRecord
    template: SamplingTemplate
    features: Sequence[Row]
    params: SamplingParams
    most_bytes: int

    async def answer(self) -> bytes:
        """Return the JSON of a SampleResponseModelList."""
        requests = self._requests(stream=False)
        self._check_size(sum(len(request.prompt) * request.topk_prompt_logprobs for request in requests) * _CELL_BYTES)
        results = await self.sampling.results(self.session, requests)
        parts: list[bytes] = []
        size = 0
        # Input by input, each in a turn of its tenant's: JSON is written without letting other threads work.
        for feature, result in zip(self.features, results, strict=True):
            encode = partial(self._encode, feature, result, size)
            parts.append(await self.text.in_thread(self.session.tenant_id, encode))
            size += len(parts[-1])
        return b'{"samples":[' + b",".join(parts) + b"]}"

    async def lines(self, codec: TextCodec) -> AsyncGenerator[Mapping[str, object], None]:
        """Yield the text of the only input's only sample, as it becomes final."""
        choice = Choice(codec, self.params.stop_strings, tools=False)
        async with aclosing(self.sampling.generate(self.session, self._requests(stream=True))) as items:
            async for _, item in items:
                if isinstance(item, SampleResult):
                    continue
                delta = choice.push(item)
                if delta.text or delta.finish_reason:
                    yield {"delta": delta.text, "finish_reason": delta.finish_reason}

    def _requests(self, *, stream: bool) -> list[SampleRequest]:
        version = self.session.version_id
        return [
            engine_request(feature, self.params, index, version, f"{self.request_id}-{index}", stream=stream)
            for index, feature in enumerate(self.features)
        ]

    def _encode(self, feature: Row, result: SampleResult, size: int) -> bytes:
        """Return the JSON of one input's samples. Runs in a thread. ``size``: bytes of the answer so far."""
        parts: list[bytes] = []
        for part in _encoded(self.template, feature, result, self.params):
            parts.append(part)
            size += len(part)
            self._check_size(size)
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        """Raise for an answer of ``size`` bytes, if that is too much."""
        if size > self.most_bytes:
            allowed = (
                f"fewer inputs, samples or log-probabilities: the answer has {size} bytes or more, "
                f"allowed are {self.most_bytes} (max_json_result_bytes)"
            )
            raise InvalidInputError("inputs", f"{len(self.features)} inputs", allowed)


def _encoded(template: SamplingTemplate, feature: Row, result: SampleResult, params: SamplingParams) -> Iterator[bytes]:
    """Yield the JSON of a SampleResponseModel, a sample at a time. Numbers that are not finite become null."""
    yield b'{"sequences":['
    for number, sequence in enumerate(result.sequences):
        yield b"," * (number > 0) + _sequence(sequence_of(template, feature, sequence, params))
    response = response_of(template, feature, replace(result, sequences=[]), params)
    rest = SampleResponseModel(
        sequences=[], prompt_logprobs=response.prompt_logprobs, topk_prompt_logprobs=response.topk_prompt_logprobs
    )
    yield b"]," + rest.model_dump_json(exclude={"sequences"}).encode().removeprefix(b"{")


def _sequence(sequence: SampledSequence) -> bytes:
    model = SampledSequenceModel(
        stop_reason=sequence.stop_reason,
        tokens=sequence.tokens,
        logprobs=cast("list[list[tuple[int, float]] | None] | None", sequence.logprobs),
        decoded=sequence.decoded,
        new_input_feature=cast("dict[str, Any]", plain(sequence.new_input_feature)),
    )
    return model.model_dump_json().encode()
