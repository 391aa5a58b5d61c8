"""The verbs of the library on the adapters of a served model. All but templates is for the compute thread."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.errors import InvalidInputError, NotFoundError, TwinkleError, UnsupportedError, UserError
from twinkle.model import group_state
from twinkle.model.group_state import SetUp
from twinkle.model.lora_verbs import LoraVerbs, PreparedPass
from twinkle.model.optimizer_group import OptimizerGroup
from twinkle.model.sequences import encode
from twinkle.model.training_state import is_due
from twinkle.model.types import Objective, ObjectiveValue, TokenValues
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.text_codec import CodecTemplate, max_characters, text_groups
from twinkle.server.types import NativePass, NativeVerb
from twinkle.server.verbs.features import FIELDS
from twinkle.server.verbs.templates import TemplateChoice, Templates
from twinkle.server.verbs.verbs import NO_ADAPTER, SET_UP

# What Python and torch raise about arguments that a tenant chose.
_MISTAKES = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)
_MOST_METRICS = 32  # of one side of an adapter; all see every pass
_STATE_DICT_NUMBERS = 2**20


class NativeAdapters(LoraVerbs):
    """``adapter_name`` is the id of the adapter's run."""

    def __init__(self, model: ServedModel, templates: Templates) -> None:
        super().__init__(model.trainer, model.name, model.tokenizer_dir, model.max_context_length, process_state=False)
        self._set_up: dict[str, SetUp] = {}
        self._templates = templates
        self._max_characters = max_characters(model.max_context_length)
        # Choices, for whoever encodes: building a template takes a while, and is not for the compute thread.
        self._chosen_templates: dict[str, TemplateChoice] = {}

    # --- adapters -----------------------------------------------------------------------------------------------------

    def add_adapter_to_model(
        self, adapter_name: str, config_or_dir: Any, *, gradient_accumulation_steps: int = 1
    ) -> None:
        """The trainer has the adapter already."""
        self.optimizer_group[adapter_name] = self._new_group(adapter_name, config_or_dir, gradient_accumulation_steps)
        self._set_up[adapter_name] = SetUp()

    def remove_adapter(self, adapter_name: str) -> None:
        self.optimizer_group.pop(adapter_name, None)
        self._set_up.pop(adapter_name, None)
        self._chosen_templates.pop(adapter_name, None)

    def is_settled(self, adapter_name: str) -> bool:
        group = self.optimizer_group.get(adapter_name)
        return group is None or group_state.is_settled(group)

    def dump(self, adapter_name: str) -> bytes | None:
        """None for an adapter that is not of this protocol."""
        group = self.optimizer_group.get(adapter_name)
        return None if group is None else group_state.dump(group, self._set_up[adapter_name])

    def put_back(self, adapter_name: str, state: bytes) -> None:
        values = group_state.read(state)
        self.add_adapter_to_model(adapter_name, values["config"])
        for verb, arguments in values["calls"]:
            self.run(adapter_name, NativeVerb(verb, arguments))
        group_state.put_back(self.optimizer_group[adapter_name], values)

    def _group(self, adapter_name: str | None) -> OptimizerGroup:
        """The library's own error would name the adapters of others. That of no adapter lasts for one pass."""
        if adapter_name == NO_ADAPTER:
            return self._new_group(NO_ADAPTER, {}, 1)
        group = None if adapter_name is None else self.optimizer_group.get(adapter_name)
        if group is None:
            raise NotFoundError("adapter", str(adapter_name))
        return group

    # --- verbs --------------------------------------------------------------------------------------------------------

    def prepare(self, adapter_name: str, asked: NativePass) -> PreparedPass:
        """A loss that a tenant chose may fail in any way: it fails alone."""
        verbs: dict[str, Callable[..., PreparedPass]] = {
            "forward": self.prepare_training_forward,
            "forward_only": self.prepare_forward,
            "forward_backward": self.prepare_forward_backward,
            "backward": self.prepare_backward,
        }
        inputs = {} if asked.verb == "backward" else {"inputs": asked.rows}
        taken = {*asked.options, "training"} & asked.loss_arguments.keys()
        if taken:
            raise InvalidInputError("arguments", min(taken), "keywords of the verb, of the loss and of the metrics")
        with _mistakes_of_tenants(asked.verb):
            prepared = verbs[asked.verb](adapter_name=adapter_name, **inputs, **asked.options, **asked.loss_arguments)
        if prepared.item.objective is None:
            return prepared
        return replace(prepared, item=replace(prepared.item, objective=_guarded(prepared.item.objective)))

    def prepare_training_forward(self, **arguments: Any) -> PreparedPass:
        return self.prepare_forward(training=True, **arguments)

    def pass_result(self, adapter_name: str, outputs: Mapping[str, Any]) -> dict[str, object]:
        """Rows of log-probabilities without padding, in the order of the inputs."""
        group = self.optimizer_group[adapter_name]
        sequences = group.status.sequences
        assert sequences is not None, "a pass was just absorbed"
        rows = {name: sequences.unpadded(outputs[name]) for name in ("logps", "entropies") if name in outputs}
        return {"loss": outputs.get("loss"), "num_tokens": outputs.get("num_tokens"), **rows}

    def run(self, adapter_name: str, asked: NativeVerb) -> object:
        """The verb's result as JSON can say it."""
        result = self._call(adapter_name, asked.verb, asked.arguments)
        if asked.verb in SET_UP:
            self._set_up[adapter_name].note(asked.verb, asked.arguments)
        if asked.verb == "clip_grad_norm":
            return "" if result is None else f"{result:.6f}"
        if asked.verb == "get_state_dict":
            return _numbers(result)
        return result

    def _call(self, adapter_name: str, verb: str, arguments: Mapping[str, object]) -> Any:
        if verb == "set_template":
            self._group(adapter_name).chosen.add("set_template")
            self._chosen_templates[adapter_name] = TemplateChoice.model_validate(arguments)
            return None
        if verb == "add_metric":
            self._check_room_for_metric(adapter_name)
        methods: dict[str, Callable[..., Any]] = {
            "calculate_loss": self.calculate_loss,
            "clip_grad_norm": self.clip_grad_norm,
            "clip_grad_and_step": self.clip_grad_and_step,
            "step": self.step,
            "zero_grad": self.zero_grad,
            "lr_step": self.lr_step,
            "set_loss": self.set_loss,
            "set_optimizer": self.set_optimizer,
            "set_lr_scheduler": self.set_lr_scheduler,
            "set_processor": self.set_processor,
            "add_metric": self.add_metric,
            "calculate_metric": self.calculate_metric,
            "get_train_configs": self.get_train_configs,
            "get_state_dict": self.get_state_dict,
        }
        with _mistakes_of_tenants(verb):
            return methods[verb](adapter_name=adapter_name, **arguments)

    def _check_room_for_metric(self, adapter_name: str) -> None:
        group = self._group(adapter_name)
        used = max(len(status.metrics) for status in (group.train_status, group.eval_status))
        if used >= _MOST_METRICS:
            raise InvalidInputError("add_metric", f"{used} metrics there already", f"at most {_MOST_METRICS}")

    # --- files --------------------------------------------------------------------------------------------------------

    def is_due(self, adapter_name: str, interval: int) -> bool:
        return is_due(self._group(adapter_name), interval)

    def steps_of(self, adapter_name: str) -> int:
        return self._group(adapter_name).cur_step

    def prepare_save(
        self, adapter_name: str, *, save_optimizer: bool, consumed_train_samples: int
    ) -> Callable[[Path], None]:
        group = self._group(adapter_name)
        return self._state.prepare_save(
            group, save_optimizer=save_optimizer, consumed_train_samples=consumed_train_samples
        )

    def encode(
        self, adapter_name: str, rows: Sequence[Mapping[str, object]], max_tokens: int
    ) -> list[Mapping[str, object]]:
        """Conversations as tokens, in any thread: with the template that was set or the plain one.

        A group of rows at a time, and no further than ``max_tokens``: a tokenizer takes 200 bytes for each token.
        """
        template = self._templates.get(self._chosen_templates.get(adapter_name, TemplateChoice()))
        if isinstance(template, CodecTemplate):
            raise UnsupportedError(f"inputs: {self.model_id} has no tokenizer; send input_ids")
        encoded: list[Mapping[str, object]] = []
        tokens = 0
        for group in text_groups(rows, self._max_characters):
            with _mistakes_of_tenants("inputs"):
                features = encode(group, lambda: template)
            encoded += [{name: np.asarray(row[name]) for name in FIELDS if name in row} for row in features]
            tokens += sum(len(row["input_ids"]) for row in features)
            if tokens > max_tokens:
                raise InvalidInputError("inputs", f"more than {max_tokens} tokens", f"at most {max_tokens}")
        return encoded


@contextmanager
def _mistakes_of_tenants(verb: str) -> Iterator[None]:
    """What Python says about wrong arguments becomes an error that names the verb."""
    try:
        yield
    except TwinkleError:
        raise
    except _MISTAKES as error:
        raise UserError(f"{verb}: {type(error).__name__}: {str(error)[:500]}") from error


def _guarded(objective: Objective) -> Objective:
    def guarded(values: Sequence[TokenValues]) -> ObjectiveValue:
        try:
            return objective(values)
        except TwinkleError:
            raise
        except Exception as error:
            raise UserError(f"the loss failed: {type(error).__name__}: {str(error)[:500]}") from error

    return guarded


def _numbers(tensors: Mapping[str, Any]) -> dict[str, object]:
    size = sum(tensor.numel() for tensor in tensors.values())
    if size > _STATE_DICT_NUMBERS:
        allowed = f"at most {_STATE_DICT_NUMBERS} as JSON; save() and download the checkpoint instead"
        raise InvalidInputError("get_state_dict", f"{size} numbers", allowed)
    return {name: tensor.detach().cpu().float().numpy() for name, tensor in tensors.items()}
