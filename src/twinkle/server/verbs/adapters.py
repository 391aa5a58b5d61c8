"""The verbs of the library on the adapters of a served model."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.errors import InvalidInputError, NotFoundError, TwinkleError, UnsupportedError, UserError
from twinkle.model.library.optimizer_group import OptimizerGroup
from twinkle.model.library.sequences import PLACED, encode
from twinkle.model.library.training_state import is_due
from twinkle.model.multi_lora import group_state
from twinkle.model.multi_lora.group_state import SetUp
from twinkle.model.multi_lora.verbs import LoraVerbs, PreparedPass
from twinkle.model.types import MAX_LOGITS
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.compute_thread import compute_thread
from twinkle.server.backends.text_codec import CodecTemplate, max_characters, text_groups
from twinkle.server.types import NativePass, NativeSave, NativeVerb
from twinkle.server.verbs.features import FIELDS, IMAGES, TYPES, files_left
from twinkle.server.verbs.templates import TemplateChoice, Templates
from twinkle.server.verbs.verbs import NO_ADAPTER, verb_named
from twinkle.server.wire.number_arrays import ROUTES, packed_routes

_MOST_METRICS = 32  # of an adapter for training, and as many for evaluation; each pass updates all of its side
_STATE_DICT_NUMBERS = 2**20


class NativeAdapters:
    """The library's verbs for adapters that the trainer of a served model already has.

    ``run_id`` names an adapter: it is the library's adapter_name. All methods belong to the compute thread, except
    :meth:`encode` and :meth:`is_settled`, which any thread may call.
    """

    def __init__(self, model: ServedModel, templates: Templates, max_logits: int = MAX_LOGITS) -> None:
        self._library = LoraVerbs(
            model.trainer,
            model.name,
            model.tokenizer_dir,
            model.max_context_length,
            process_state=False,
            guard=chosen_by_tenant,
            max_logits=max_logits,
        )
        self._trainer = model.trainer
        self._set_up: dict[str, SetUp] = {}
        self._templates = templates
        self._max_characters = max_characters(model.max_context_length)
        # The template chosen for each adapter. The thread that encodes builds the template from it, because that takes
        # too long for the compute thread.
        self._chosen_templates: dict[str, TemplateChoice] = {}

    # --- adapters -----------------------------------------------------------------------------------------------------

    @compute_thread
    def add(self, run_id: str, config: Mapping[str, object], gradient_accumulation_steps: int = 1) -> None:
        """Register an adapter that the trainer already has."""
        self._library.add_adapter_to_model(run_id, config, gradient_accumulation_steps=gradient_accumulation_steps)
        self._set_up[run_id] = SetUp()

    @compute_thread
    def remove(self, run_id: str) -> None:
        self._library.optimizer_group.pop(run_id, None)
        self._set_up.pop(run_id, None)
        self._chosen_templates.pop(run_id, None)

    def is_settled(self, run_id: str) -> bool:
        """Return whether a snapshot would hold the whole state: False between a forward and its backward pass."""
        group = self._library.optimizer_group.get(run_id)
        return group is None or group_state.is_settled(group)

    @compute_thread
    def drop_window(self, run_id: str) -> None:
        """Reset what was counted for the present window, whose gradient is dropped."""
        group = self._library.optimizer_group.get(run_id)
        if group is not None:
            group.drop_window()

    @compute_thread
    def dump(self, run_id: str) -> bytes | None:
        """Return the state that a snapshot keeps beside the trainer's; None if no native adapter has this id."""
        group = self._library.optimizer_group.get(run_id)
        return None if group is None else group_state.dump(group, self._set_up[run_id])

    @compute_thread
    def restore(self, run_id: str, state: bytes) -> None:
        """Restore the state that :meth:`dump` returned: run the verbs that set it up, then put the counters back."""
        values = group_state.read(state)
        self.add(run_id, values["config"])
        for verb, arguments in values["calls"]:
            self.run(run_id, NativeVerb(verb, arguments))
        group_state.restore(self.group(run_id), values)

    def group(self, run_id: str) -> OptimizerGroup:
        """Return the optimizer group of an adapter, or raise NotFoundError. The library's own error would list adapters
        of other tenants.
        """
        group = self._library.optimizer_group.get(run_id)
        if group is None:
            raise NotFoundError("adapter", run_id)
        return group

    # --- verbs --------------------------------------------------------------------------------------------------------

    @compute_thread
    def prepare(self, run_id: str, asked: NativePass) -> PreparedPass:
        """Return a pass that is ready to be computed."""
        self.group(run_id)
        return self._prepared(run_id, asked)

    @compute_thread
    def prepare_without_adapter(self, asked: NativePass) -> PreparedPass:
        """Return a forward pass of the base model, made with an optimizer group that exists only for this call."""
        self._library.add_adapter_to_model(NO_ADAPTER, {})
        try:
            return self._prepared(NO_ADAPTER, asked)
        finally:
            del self._library.optimizer_group[NO_ADAPTER]

    def _prepared(self, run_id: str, asked: NativePass) -> PreparedPass:
        library = self._library
        verbs: dict[str, Callable[..., PreparedPass]] = {
            "forward": partial(library.prepare_forward, training=True),
            "forward_only": library.prepare_forward,
            "forward_backward": library.prepare_forward_backward,
            "backward": library.prepare_backward,
        }
        rows: Sequence[Mapping[str, object]] = asked.rows
        if asked.images:
            rows = [{**row, PLACED: images} for row, images in zip(rows, asked.images, strict=True)]
        inputs = {} if asked.verb == "backward" else {"inputs": rows}
        taken = {*asked.options, "self", "training"} & asked.loss_arguments.keys()
        if taken:
            raise InvalidInputError("arguments", min(taken), "keywords of the verb, of the loss and of the metrics")
        return verbs[asked.verb](adapter_name=run_id, **inputs, **asked.options, **asked.loss_arguments)

    @compute_thread
    def pass_result(self, run_id: str, outputs: Mapping[str, Any]) -> dict[str, object]:
        """Return the result of a pass; see :func:`rows_of` for its rows."""
        sequences = self.group(run_id).status.sequences
        assert sequences is not None, "a pass was just absorbed"
        rows = rows_of(outputs, sequences.lengths)
        return {"loss": outputs.get("loss"), "num_tokens": outputs.get("num_tokens"), **rows}

    def rows(self, outputs: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, list[Any]]:
        """Call :func:`rows_of`, for callers that must not import this module, which needs torch."""
        return rows_of(outputs, lengths)

    @compute_thread
    def run(self, run_id: str, asked: NativeVerb) -> object:
        """Run a verb that is not a pass, and return its result: JSON values, or arrays by name for get_state_dict."""
        result = self._call(run_id, asked.verb, asked.arguments)
        if verb_named(asked.verb).sets_up:
            self._set_up[run_id].record(asked.verb, asked.arguments)
        if asked.verb == "clip_grad_norm":
            return "" if result is None else f"{result:.6f}"
        if asked.verb == "get_state_dict":
            return {name: tensor.detach().cpu().float().numpy() for name, tensor in result.items()}
        return result

    def _call(self, run_id: str, verb: str, arguments: Mapping[str, object]) -> Any:
        if verb == "set_template":
            self.group(run_id).chosen.add("set_template")
            self._chosen_templates[run_id] = TemplateChoice.model_validate(arguments)
            return None
        if verb == "add_metric":
            self._check_room_for_metric(run_id)
        if "self" in arguments:
            raise InvalidInputError("arguments", "self", "keywords of the verb, of the loss and of the metrics")
        self.group(run_id)
        if verb == "get_state_dict":
            _check_size(self._trainer.shapes(run_id))
        sets_up = verb_named(verb).sets_up  # raises for names outside the table, so getattr finds only verbs
        method: Callable[..., Any] = getattr(self._library, verb)
        with chosen_by_tenant(verb) if sets_up else nullcontext():  # verbs that set up construct what a tenant chose
            return method(adapter_name=run_id, **arguments)

    def _check_room_for_metric(self, run_id: str) -> None:
        group = self.group(run_id)
        used = max(len(status.metrics) for status in (group.train_status, group.eval_status))
        if used >= _MOST_METRICS:
            raise InvalidInputError("add_metric", f"{used} metrics there already", f"at most {_MOST_METRICS}")

    # --- files --------------------------------------------------------------------------------------------------------

    @compute_thread
    def is_due(self, run_id: str, interval: int) -> bool:
        """Return whether the adapter is to be saved after its last step, if it is saved every ``interval`` steps."""
        return is_due(self.group(run_id), interval)

    @compute_thread
    def prepare_save(self, run_id: str, save: NativeSave) -> Callable[[Path], None]:
        """Copy the state to be saved, and return a function that writes the files."""
        return self._library.state.prepare_save(
            self.group(run_id), save_optimizer=save.optimizer, consumed_train_samples=save.consumed_train_samples
        )

    @compute_thread
    def resume(self, run_id: str, directory: Path, *, optimizer: bool) -> tuple[dict[str, int], list[str]]:
        """Load a checkpoint in the library's format. Return the training progress that it records, and the names of
        state that it does not have although it was asked for.
        """
        return self._library.state.resume(self.group(run_id), directory, resume_only_model=not optimizer)

    def encode(self, run_id: str, rows: Sequence[Mapping[str, object]], max_tokens: int) -> list[Mapping[str, object]]:
        """Return conversations as tokens, with the adapter's template or the plain one. Any thread may call this.

        Rows are encoded in groups, until one brings the total above ``max_tokens``: InvalidInputError.
        UnsupportedError: the model has no tokenizer.
        """
        template = self._templates.get(self._chosen_templates.get(run_id, TemplateChoice()))
        if isinstance(template, CodecTemplate):
            raise UnsupportedError(f"inputs: {self._library.model_id} has no tokenizer; send input_ids")
        encoded: list[Mapping[str, object]] = []
        tokens = 0
        for group in text_groups(rows, self._max_characters):
            with chosen_by_tenant("inputs"):
                features = encode(group, lambda: template)
            for row in features:
                columns: dict[str, object] = {name: np.asarray(row[name]) for name in FIELDS if name in row}
                images = files_left(row, template.truncation_strategy, f"inputs[{len(encoded)}]")
                if images:
                    columns |= {IMAGES: [image.file for image in images.files], TYPES: images.types}
                encoded.append(columns)
            tokens += sum(len(row["input_ids"]) for row in features)
            if tokens > max_tokens:
                raise InvalidInputError("inputs", f"more than {max_tokens} tokens", f"at most {max_tokens}")
        return encoded


@contextmanager
def chosen_by_tenant(what: str) -> Iterator[None]:
    """Turn an exception in this context that is not a TwinkleError into a UserError: the tenant's mistake.

    Use it around code that the tenant chose: a loss, metric, schedule, processor or template. It may fail in any way,
    because of its options or its data. An error anywhere else is ours: it is logged, and answered as a failure of the
    server.
    """
    try:
        yield
    except TwinkleError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {str(error)[:500]}") from error


def rows_of(outputs: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, list[Any]]:
    """Return the outputs of a pass as arrays, one for each sequence, in the order of the inputs and without padding.

    They are log-probabilities, entropies and logits of each token, or one embedding. Routes to experts are packed.
    """
    rows: dict[str, list[Any]] = {
        name: [row[:length].numpy() for row, length in zip(outputs[name], lengths, strict=True)]
        for name in ("logps", "entropies", "logits")
        if name in outputs
    }
    if "embeddings" in outputs:
        rows["embeddings"] = list(outputs["embeddings"].numpy())
    if ROUTES in outputs:
        pairs = zip(outputs[ROUTES], lengths, strict=True)
        rows[ROUTES] = [packed_routes(row[:length].numpy()) for row, length in pairs]
    return rows


def _check_size(shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise InvalidInputError if the numbers of a state dict are too many for one answer, before they are copied."""
    size = sum(math.prod(shape) for shape in shapes.values())
    if size > _STATE_DICT_NUMBERS:
        allowed = f"at most {_STATE_DICT_NUMBERS} as JSON; save() and download the checkpoint instead"
        raise InvalidInputError("get_state_dict", f"{size} numbers", allowed)
