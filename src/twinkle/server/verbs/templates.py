"""Templates that tenants choose. Only the choice, which is small, is stored; a template is built when it is needed."""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.sampler.script.features import CompletionTemplate
from twinkle.server.backends.backend import ServedModel
from twinkle.server.backends.text_codec import CodecTemplate
from twinkle.server.wire.fields import Parameters
from twinkle.server.wire.image_files import NOTHING_OUTSIDE

if TYPE_CHECKING:
    from twinkle.template import Template

TEMPLATES = ("DeepseekV4Template", "Qwen2_5VLTemplate", "Qwen3Template", "Qwen3_5Template", "Template")

Text = Annotated[str, Field(max_length=65_536)]


class SamplingTemplate(CompletionTemplate, Protocol):
    """The methods of a :class:`~twinkle.template.Template` that sampling calls, from several threads at once."""

    truncation_strategy: str

    def batch_encode(
        self, trajectories: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> list[dict[str, Any]]: ...


class TemplateChoice(Parameters):
    """A class of :mod:`twinkle.template` and its options. The model is not among them: it is the served one.

    A sampler's session or an adapter without a choice has the plain template, which does not truncate.
    """

    template_cls: Text = "Template"
    use_chat_template: bool = True
    max_length: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    truncation_strategy: Literal["delete", "left", "raise", "right"] = "raise"
    default_system: Text | None = None
    enable_thinking: bool = True


class SetTemplate(TemplateChoice):
    """The body of set_template. On a sampler it sets the template of the session, whatever ``adapter_name`` says."""

    template_cls: Text
    max_length: Annotated[int, Field(ge=0, lt=2**31)] | None = 8192  # the library's default
    model_id: Text | None = None
    adapter_name: Text | None = ""

    def choice(self, model: ServedModel) -> TemplateChoice:
        """Return the choice, checked against the model that the sampler serves."""
        if self.template_cls not in TEMPLATES:
            raise UnknownNameError("template", self.template_cls, TEMPLATES)
        names = (model.name, *model.aliases)
        if self.model_id is not None and _plain(self.model_id) not in map(_plain, names):
            raise InvalidInputError("model_id", self.model_id, f"the served model: {', '.join(names)}")
        return TemplateChoice.model_validate(self.model_dump(include=set(TemplateChoice.model_fields)))


class Templates:
    """The templates of one model. Used from several threads.

    A tokenizer takes most of a second to load and up to a hundred megabytes: each template class loads its own once,
    and every choice of options is a small object over it.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._loaded: dict[str, Template] = {}  # one of each class
        self._loading = {name: threading.Lock() for name in TEMPLATES}

    def get(self, choice: TemplateChoice) -> SamplingTemplate:
        """Return the chosen template. The first of its class loads a tokenizer: do not call this on the event loop.

        A model that has a codec but no tokenizer files gets a CodecTemplate, whatever the choice. UnsupportedError: the
        model has neither.
        """
        if self._model.tokenizer_dir is None:
            if self._model.text is None:
                raise UnsupportedError(f"{self._model.name} has no tokenizer, and without one there is no text")
            return CodecTemplate(self._model.text)
        with self._loading[choice.template_cls]:
            if choice.template_cls not in self._loaded:
                self._loaded[choice.template_cls] = self._load(choice.template_cls, self._model.tokenizer_dir)
        loaded = self._loaded[choice.template_cls]
        chosen: SamplingTemplate = loaded.with_options(**choice.model_dump(exclude={"template_cls"}))
        return chosen

    def _load(self, name: str, folder: str) -> "Template":
        # This imports torch, which is there wherever a model with a tokenizer is served.
        from twinkle.model.library.components import build_template

        try:
            loaded: Template = build_template(name, {"model_id": folder})
        except UserError as error:  # its message names the folder, which tenants must not see
            raise UnsupportedError(str(error).replace(folder, self._model.name)) from error
        loaded.model_id = self._model.name  # its errors show this name
        # The vision tower knows most images already, so files are only decoded once it is known which ones it needs.
        loaded.image_source, loaded.decodes_images = NOTHING_OUTSIDE, False
        return loaded


def _plain(name: str) -> str:
    """Return the name without its scheme, which clients leave out of addresses."""
    return name.rpartition("://")[2]
