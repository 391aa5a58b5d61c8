"""Templates that tenants chose. A choice is small and kept; templates are built from it when needed."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.sampler.features import CompletionTemplate
from twinkle.server.backend import ServedModel
from twinkle.server.codec_template import CodecTemplate
from twinkle.server.wire.fields import Parameters

TEMPLATES = ("DeepseekV4Template", "Qwen3Template", "Qwen3_5Template", "Template")
# Built ones that are kept: each holds a tokenizer, some ten to hundred megabytes.
_KEPT = 32

Text = Annotated[str, Field(max_length=65_536)]


class SamplingTemplate(CompletionTemplate, Protocol):
    """What sampling needs of a :class:`~twinkle.template.Template`. Used from several threads at once."""

    def batch_encode(
        self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> list[dict[str, Any]]: ...


class TemplateChoice(Parameters):
    """A class of :mod:`twinkle.template` and its options, but for the model, which is that of the sampler.

    Without a choice a session has the plain template, which never truncates.
    """

    template_cls: Text = "Template"
    use_chat_template: bool = True
    max_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    truncation_strategy: Literal["delete", "left", "raise", "right"] = "raise"
    default_system: Text | None = None
    enable_thinking: bool = True


class SetTemplate(TemplateChoice):
    """The body of set_template. A sampler's is its session's, whatever adapter it names."""

    template_cls: Text
    max_length: Annotated[int, Field(ge=0, lt=2**31)] | None = 8192  # as the library has it
    model_id: Text | None = None
    adapter_name: Text | None = ""

    def choice(self, model: ServedModel) -> TemplateChoice:
        """Checked against the model that the sampler serves."""
        if self.template_cls not in TEMPLATES:
            raise UnknownNameError("template", self.template_cls, TEMPLATES)
        names = (model.name, *model.aliases)
        if self.model_id is not None and _plain(self.model_id) not in map(_plain, names):
            raise InvalidInputError("model_id", self.model_id, f"the served model: {', '.join(names)}")
        return TemplateChoice.model_validate(self.model_dump(include=set(TemplateChoice.model_fields)))


class Templates:
    """Built templates of one model; those who chose the same share one. Used from several threads."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._built: OrderedDict[TemplateChoice, SamplingTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, choice: TemplateChoice) -> SamplingTemplate:
        """Loading a tokenizer takes a while: not for the event loop."""
        with self._lock:
            if choice not in self._built:
                self._built[choice] = _build(self._model, choice)
            self._built.move_to_end(choice)
            while len(self._built) > _KEPT:
                self._built.popitem(last=False)
            return self._built[choice]


def _build(model: ServedModel, choice: TemplateChoice) -> SamplingTemplate:
    folder = model.tokenizer_dir
    if folder is None:
        if model.text is None:
            raise UnsupportedError(f"{model.name} has no tokenizer, and without one there is no text")
        return CodecTemplate(model.text)
    from twinkle.model.components import build_template  # where there is a tokenizer there is torch

    options = choice.model_dump(exclude={"template_cls"})
    try:
        built = build_template(choice.template_cls, {"model_id": folder, **options})
    except UserError as error:  # they name the folder, which is nobody's business
        raise UnsupportedError(str(error).replace(folder, model.name)) from error
    built.model_id = model.name  # that is what its errors name
    template: SamplingTemplate = built
    return template


def _plain(name: str) -> str:
    """Without a scheme, which clients leave out of addresses."""
    return name.rpartition("://")[2]
