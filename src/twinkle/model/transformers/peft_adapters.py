"""Adds, switches, saves and loads PEFT adapters on a plain model."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from twinkle.errors import AdapterExistsError, CheckpointError, InvalidInputError, UnsupportedError
from twinkle.extras import missing
from twinkle.hub.construction import check_options
from twinkle.model.adapters.checkpoint import CONFIG, WEIGHTS, read_json
from twinkle.model.adapters.peft_config import NOTE, head_note
from twinkle.model.decoder.lora.stacks import initial_a
from twinkle.model.library.training_state import find_checkpoint
from twinkle.utils.logger import get_logger

_TOWER = r"(?:.*\.)?visual\..*"  # the modules of a vision tower
# The config fields that determine the factor on an adapter's product B A; r also shows in the weights' shapes.
_SCALE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora")


class PeftAdapters:
    """The adapters of one model. PEFT adds LoRA to the model's layers in place; ``wrapper`` is PEFT's model object."""

    def __init__(self, model: PreTrainedModel, *, half_base: bool) -> None:
        """half_base: store the model's weights in bf16 once they are frozen under adapters."""
        self._model = model
        self._half_base = half_base
        self.wrapper: Any = None  # a peft.PeftModel; None without adapters
        self._trainable: dict[str, bool] = {}

    def add(self, name: str, config_or_dir: Any, is_trainable: bool) -> None:
        """Add an adapter and activate it. Raise InvalidInputError if PEFT refuses the config."""
        if "." in name:  # PEFT uses adapter names as names of modules, which cannot have dots
            raise InvalidInputError("adapter_name", name, "a name without dots")
        if self.wrapper is not None and name in self.wrapper.peft_config:
            raise AdapterExistsError(name)
        base = list(self._model.parameters()) if self.wrapper is None else []
        is_directory = isinstance(config_or_dir, str | Path)
        source: Any = find_checkpoint(str(config_or_dir), None, None) if is_directory else _lora_config(config_or_dir)
        source = source if is_directory else self._without_tower(source)
        described = read_json(source / CONFIG) if is_directory else source.to_dict()
        self._check_biases(described)
        try:
            with _repeatable(described):
                if is_directory:
                    self._load_new(name, str(source), is_trainable)
                else:
                    self._add_new(name, source)
        except ValueError as error:  # what PEFT raises, for example for unknown target modules
            raise InvalidInputError("config_or_dir", config_or_dir, f"what PEFT accepts ({error})") from error
        if not is_trainable:
            for parameter in base:  # also biases that the config would train
                parameter.requires_grad_(False)
        self._halve(base)
        self._trainable[name] = is_trainable
        self._set(name)

    def _without_tower(self, config: Any) -> Any:
        """Return a config that chooses no modules of a vision tower.

        Adapters of servers and samplers are on the decoder alone, and features of images do not depend on them.
        """
        if getattr(self._model.base_model, "visual", None) is None:
            return config
        changed, given = copy.copy(config), config.exclude_modules
        if config.target_modules == "all-linear":  # PEFT would write the names of the tower's layers into its config
            decoder = self._model.get_decoder().named_modules()
            names = {name.rpartition(".")[2] for name, module in decoder if isinstance(module, nn.Linear)}
            changed.target_modules = names
        if given is None or isinstance(given, str):
            changed.exclude_modules = _TOWER if given is None else f"(?:{given})|(?:{_TOWER})"
        else:
            tower = (name for name, _ in self._model.named_modules() if re.fullmatch(_TOWER, name))
            changed.exclude_modules = [*given, *tower]
        return changed

    def _check_biases(self, added: Mapping[str, Any]) -> None:
        """Raise if one of several adapters trains biases of the base model, which the others would compute with."""
        others = [] if self.wrapper is None else [self.config(name) for name in self.wrapper.peft_config]
        for config in [added, *others] if others else []:
            if config.get("bias", "none") != "none":
                raise UnsupportedError(
                    f"bias: got {config['bias']!r}, which trains biases of the base model; with several adapters, "
                    "which share it, only 'none' is allowed"
                )

    def _add_new(self, name: str, config: Any) -> None:
        if self.wrapper is None:
            self.wrapper = _peft().get_peft_model(self._model, config, adapter_name=name)
        else:
            self.wrapper.add_adapter(name, config)

    def _load_new(self, name: str, directory: str, is_trainable: bool) -> None:
        if self.wrapper is None:
            load = _peft().PeftModel.from_pretrained
            self.wrapper = load(self._model, directory, adapter_name=name, is_trainable=is_trainable)
        else:
            self.wrapper.load_adapter(directory, name, is_trainable=is_trainable)

    def draw_weights(self, name: str, seed: int) -> None:
        """Draw the initial A of all layers and parameters anew, by seed and name, as a :class:`Trainer` does.

        An adapter whose config asks for another initialisation keeps the weights that PEFT gave it.
        """
        if self.wrapper.peft_config[name].init_lora_weights is not True:
            return
        linear, parameter = _peft().tuners.lora.Linear, _peft().tuners.lora.ParamWrapper
        for module_name, module in self.wrapper.base_model.model.named_modules():
            if isinstance(module, linear | parameter) and name in module.lora_A:
                target = module_name
                if isinstance(module, parameter):  # PEFT wraps a module once for each of its parameters
                    target = module_name.replace(".base_layer", "")
                    target += "" if module.parameter_name == "weight" else f".{module.parameter_name}"
                a_RI = module.lora_A[name].weight
                with torch.no_grad():
                    a_RI.copy_(initial_a(target, a_RI.shape[0], a_RI.shape[1], seed))

    def is_trainable(self, name: str) -> bool:
        return self._trainable[name]

    def activate(self, name: str) -> None:
        if self.wrapper.active_adapter != name:
            self._set(name)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        if self.wrapper is None:
            yield
        else:
            for config in self.wrapper.peft_config.values():
                if _changes_base(config.to_dict()):
                    get_logger().warning_once(
                        f"disable_lora: without an adapter of init_lora_weights={config.init_lora_weights!r} the model "
                        "is not the original one, because the initial adapter was subtracted from its weights"
                    )
            with self.wrapper.disable_adapter():
                yield

    def config(self, name: str) -> dict[str, Any]:
        """Return the adapter's PEFT config as a dict."""
        config: dict[str, Any] = self.wrapper.peft_config[name].to_dict()
        return config

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """Return the weights by PEFT's names, without the adapter's name."""
        # Without embeddings, which are not trained; PEFT would ask the hub whether they were changed.
        options = {"adapter_name": name, "save_embedding_layers": False}
        state: dict[str, Tensor] = _peft().get_peft_model_state_dict(self.wrapper, **options)
        return state

    def save(self, name: str, directory: Path, base_name: str) -> None:
        """Write the adapter as PEFT does. ``base_name``: the name by which PEFT finds the base model."""
        config = copy.deepcopy(self.wrapper.peft_config[name])
        config.inference_mode, config.base_model_name_or_path = True, base_name
        if config.task_type is None:  # then AutoPeftModel needs the class of the base model
            kind = type(self._model)
            config.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(directory)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in self.state_dict(name).items()}
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        head = self._model.get_output_embeddings()
        if isinstance(head, _peft().tuners.lora.LoraLayer) and name in head.lora_A:
            (directory / NOTE).write_text(head_note(base_name))

    def load(self, name: str, directory: Path) -> None:
        try:
            tensors = load_file(directory / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"could not read {directory / WEIGHTS}: {error}") from error
        self._check_same_function(name, directory)
        expected = {key: tuple(tensor.shape) for key, tensor in self.state_dict(name).items()}
        found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        if found != expected:
            wrong = sorted(set(found.items()) ^ set(expected.items()))[:3]
            raise CheckpointError(f"{directory / WEIGHTS} does not fit adapter {name!r}; different: {wrong}")
        _peft().set_peft_model_state_dict(self.wrapper, tensors, adapter_name=name)

    def _check_same_function(self, name: str, directory: Path) -> None:
        """Raise if a checkpoint's weights mean something else here: with another scale, or on other base weights."""
        saved, own = read_json(directory / CONFIG), self.config(name)
        fields = (*_SCALE, "init_lora_weights") if _changes_base(saved) or _changes_base(own) else _SCALE
        for field in fields:
            if field in saved and saved[field] != own[field]:
                raise CheckpointError(
                    f"{directory} does not fit adapter {name!r}; {field}: got {saved[field]!r}, allowed: {own[field]!r}"
                )

    @staticmethod
    def is_adapter(directory: Path) -> bool:
        return (directory / CONFIG).exists()

    def _set(self, name: str) -> None:
        self.wrapper.set_adapter(name, inference_mode=not self._trainable[name])

    def _halve(self, base: Sequence[nn.Parameter]) -> None:
        """With ``half_base``, convert the base model, which PEFT has frozen, to bf16.

        Under bf16 autocast every product rounds its weights to bf16 anyway, so frozen weights can be stored like that.
        """
        for parameter in base:
            if parameter.requires_grad:  # a bias that the adapter trains; PEFT has frozen all others
                continue
            if self._half_base:
                parameter.data = parameter.data.to(torch.bfloat16)


@contextmanager
def _repeatable(config: Mapping[str, Any]) -> Iterator[None]:
    """Let PEFT draw the same numbers whenever it initialises with a random decomposition of the base model's weights.

    Otherwise the weights of a checkpoint would belong to other base weights than those of the model that loads it.
    """
    if not str(config.get("init_lora_weights")).startswith("pissa_niter"):
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _changes_base(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT changed weights of the base model when it initialised an adapter."""
    how = config.get("init_lora_weights")
    return isinstance(how, str) and how.startswith(("pissa", "olora", "corda", "loftq", "lora_ga"))


def _lora_config(config: Any) -> Any:
    """Return a PEFT config, made from its fields if a mapping is given."""
    peft = _peft()
    if isinstance(config, Mapping):
        check_options(peft.LoraConfig, config)
        return peft.LoraConfig(**config)
    if not isinstance(config, peft.LoraConfig):
        raise InvalidInputError("config_or_dir", config, "a LoraConfig, or a directory with an adapter")
    return config


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise missing("peft", "an adapter on a TransformersModel") from None
    return peft
