"""The template: converts conversations to model inputs, and tokens back to text.

``encode`` has four steps:

1. The pre-pipeline brings the messages into a standard form.
2. The chat template renders them, once, to a text in which the assistant's parts are known
   (:mod:`twinkle.template.chat_template`).
3. One call of the tokenizer turns the texts of a whole batch into tokens; the assistant's parts become labels.
4. The post-pipeline truncates, adds masks and positions, and shifts the labels.
"""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from twinkle.data_format import ToolCall
from twinkle.data_format.columns import columns_to_rows, rows_to_columns
from twinkle.errors import InvalidInputError, UnknownNameError, UnsupportedError, UserError
from twinkle.extras import require
from twinkle.hub import HubOperation
from twinkle.hub.model_id import id_text
from twinkle.images import ImageProcessing, ImageSource
from twinkle.template.chat_template import ChatRenderer, ChatTemplate, Rendered
from twinkle.template.labels import IGNORE, IntArray, encode_texts, label_spans, shift_labels, unshift_labels
from twinkle.template.media import ImageEncoder, VisionProcessor, images_of, refuse_unread, with_image_blocks
from twinkle.template.messages import (
    conversation,
    key_rounds,
    nested_names,
    only_text,
    plain_text,
    refuse_media,
    renderable,
    split_reasoning,
    tools_of,
    with_system,
)
from twinkle.template.tools import ToolCallRegistry
from twinkle.template.truncation import TRUNCATION_STRATEGIES, truncate

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["Template"]

Row = dict[str, Any]
Columns = dict[str, list[Any]]

_logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 2**20  # longer generated texts are not searched for tool calls


class Template:
    """A template that uses the chat template of a model's tokenizer.

    ``max_length=None`` (or 0) never truncates; ``truncation_strategy`` says what happens to longer rows: "raise", keep
    the last tokens ("left") or the first ("right"), "split" or "delete". ``default_system`` is put before conversations
    that start with the user. ``enable_thinking`` is passed to the chat template. With ``use_chat_template=False``, a
    trajectory is one user message, whose whole text is learnt.

    The template of a vision model reads images as well (:mod:`twinkle.template.media`). Its rows have ``pixel_values``,
    ``image_grid_thw`` and ``mm_token_type_ids`` for them.
    """

    image_placeholder = "<image>"
    video_placeholder = "<video>"
    audio_placeholder = "<audio>"

    is_mm = False  # whether the model's folder has an image processor
    image_source = ImageSource()  # where images may come from; a server's has no paths and URLs
    # False: only the headers of image files are read. Rows have no pixel_values, and their messages have the files.
    decodes_images = True

    # Names of methods, in order; a subclass may replace steps or add its own.
    pre_pipeline_names: Sequence[str] = ("_add_default_system", "_extract_reasoning", "_build_standard_messages")
    post_pipeline_names: Sequence[str] = ("_check_max_length", "_add_attention_fields", "_roll_labels")

    def __init__(
        self,
        model_id: str | PathLike[str],
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: str = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
    ) -> None:
        if not isinstance(model_id, str | PathLike) or not model_id:
            raise InvalidInputError("model_id", model_id, "the id of a model or a local directory")
        self.model_id = id_text(model_id)
        self._set_options(use_chat_template, max_length, truncation_strategy, default_system, enable_thinking)
        self._chat_templates: dict[bool, ChatTemplate] = {}
        self._folder = Path(HubOperation.download_model(model_id, ignore_model=True))
        self.is_mm = any((self._folder / f"{name}_config.json").is_file() for name in ("preprocessor", "processor"))
        self.tokenizer: PreTrainedTokenizerBase = self._load_tokenizer()
        if not self.tokenizer.is_fast:
            raise UnsupportedError(f"{model_id}: its tokenizer is not a fast one and cannot map tokens to characters")

    def with_options(
        self,
        use_chat_template: bool = True,
        max_length: int | None = 8192,
        truncation_strategy: str = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
    ) -> Self:
        """Return a template with these options and the tokenizer of this one, which is not loaded again."""
        other = copy.copy(self)
        other._set_options(use_chat_template, max_length, truncation_strategy, default_system, enable_thinking)
        return other

    def _set_options(
        self,
        use_chat_template: bool,
        max_length: int | None,
        truncation_strategy: str,
        default_system: str | None,
        enable_thinking: bool,
    ) -> None:
        if truncation_strategy not in TRUNCATION_STRATEGIES:
            raise UnknownNameError("truncation_strategy", truncation_strategy, TRUNCATION_STRATEGIES)
        if max_length is not None and (not isinstance(max_length, int) or max_length < 0):
            raise InvalidInputError("max_length", max_length, "a number of tokens, or None (or 0) for no limit")
        self.use_chat_template = use_chat_template
        self.max_length = max_length
        self.truncation_strategy = truncation_strategy
        self.default_system = default_system
        self.enable_thinking = enable_thinking

    def _load_tokenizer(self) -> "PreTrainedTokenizerBase":
        require("transformers", type(self).__name__)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    @cached_property
    def processor(self) -> "VisionProcessor | PreTrainedTokenizerBase":
        """Return the processor, which also reads images; for text models, the tokenizer."""
        if not self.is_mm:
            return self.tokenizer
        return VisionProcessor(self.tokenizer, self._images.processing, self._images.token)

    @property
    def image_processing(self) -> ImageProcessing | None:
        """Return what prepares images for the model; None if it reads text only."""
        return self._images.processing if self.is_mm else None

    @cached_property
    def _images(self) -> ImageEncoder:
        return ImageEncoder(self._folder, self.config, self.model_id)

    @cached_property
    def config(self) -> "PretrainedConfig":
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self._folder, local_files_only=True)

    # --- encoding ---------------------------------------------------------------------------------------------------

    def encode(
        self,
        trajectory: Mapping[str, Any],
        add_generation_prompt: bool = False,
        *,
        tokenize: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Row:
        """Return the trajectory with ``input_ids``, ``labels``, ``attention_mask``, ``position_ids``, ``length`` added.

        With a generation prompt nothing is learnt: all labels are −100. ``tokenize=False`` adds only the rendered text,
        as ``prompt``. ``chat_template_kwargs`` are further variables for the chat template.
        """
        self._require_one_for_one("encode")
        features = self._encode_rows([trajectory], add_generation_prompt, tokenize, chat_template_kwargs or {})[0]
        if not features:
            raise InvalidInputError(
                "messages", "more than max_length", f"{self.max_length} tokens (truncation_strategy 'delete')"
            )
        return features[0]

    @overload
    def batch_encode(
        self,
        trajectories: Mapping[str, Sequence[Any]],
        add_generation_prompt: bool = ...,
        *,
        tokenize: bool = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
    ) -> Columns: ...

    @overload
    def batch_encode(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = ...,
        *,
        tokenize: bool = ...,
        chat_template_kwargs: Mapping[str, Any] | None = ...,
    ) -> list[Row]: ...

    def batch_encode(
        self,
        trajectories: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        *,
        tokenize: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Columns | list[Row]:
        """Encode many trajectories at once, like :meth:`encode`. Rows give rows, columns give columns.

        The truncation strategy 'delete' omits rows, and 'split' makes several of one. If a row holds several
        trajectories under other keys (``positive``, ``negative``), each of them is encoded in place.
        """
        rows: list[Row] = columns_to_rows(trajectories)  # type: ignore[arg-type]  # a Mapping row is read only
        nested = nested_names(rows)
        variables = chat_template_kwargs or {}
        if nested:
            encoded = self._encode_nested(rows, nested, add_generation_prompt, tokenize, variables)
        else:
            per_row = self._encode_rows(rows, add_generation_prompt, tokenize, variables)
            encoded = [feature for features in per_row for feature in features]
        if not isinstance(trajectories, Mapping):
            return encoded
        # a batch without rows still has its columns
        return rows_to_columns(encoded) if encoded else {name: [] for name in (*trajectories, *_FEATURE_KEYS)}

    def _encode_nested(
        self,
        rows: list[Row],
        names: Sequence[str],
        add_generation_prompt: bool,
        tokenize: bool,
        variables: Mapping[str, Any],
    ) -> list[Row]:
        self._require_one_for_one("a row of several trajectories")
        columns = {
            name: self._encode_rows([row[name] for row in rows], add_generation_prompt, tokenize, variables)
            for name in names
        }
        return [
            {**row, **{name: columns[name][index][0] for name in names}}
            for index, row in enumerate(rows)
            if all(columns[name][index] for name in names)  # with 'delete', one deleted part drops the row
        ]

    def _encode_rows(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tokenize: bool,
        variables: Mapping[str, Any],
    ) -> list[list[Row]]:
        """Return, for each trajectory, the list of features made from it."""
        for trajectory in trajectories:
            if not isinstance(trajectory, Mapping):
                raise InvalidInputError("trajectory", trajectory, "a dict with 'messages'")
        prepared = [self._invoke_pre_pipeline([dict(trajectory)]) for trajectory in trajectories]
        flat = [trajectory for group in prepared for trajectory in group]
        if self.use_chat_template:
            rendered = self._render(flat, add_generation_prompt, variables)
        else:
            rendered = [Rendered(only_text(trajectory), []) for trajectory in flat]
        if tokenize:
            encoded = iter(self._tokenize(flat, rendered, add_generation_prompt))
            return [self._invoke_post_pipeline([next(encoded) for _ in group]) for group in prepared]
        texts = iter(rendered)
        return [[{**trajectory, "prompt": next(texts).text} for trajectory in group] for group in prepared]

    def _render(
        self, trajectories: Sequence[Row], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> list[Rendered]:
        variables = {"enable_thinking": self.enable_thinking, **variables}
        rendered = []
        for trajectory in trajectories:
            tools = tools_of(trajectory)
            chat = self._chat_template(tools is not None)
            messages = [renderable(message, chat.reasoning_fields) for message in trajectory["messages"]]
            if add_generation_prompt:
                rendered.append(Rendered(chat.render(messages, tools, variables, add_generation_prompt=True), []))
                continue
            turns = chat.render_turns(messages, tools, variables)
            wanted = key_rounds(trajectory)
            if wanted is not None:
                turns = Rendered(turns.text, [span for span in turns.spans if span.message in wanted])
            rendered.append(turns)
        return rendered

    def _chat_template(self, with_tools: bool) -> ChatRenderer:
        """Return the tokenizer's chat template. Some tokenizers have a second one for conversations with tools."""
        source = self._template_source(with_tools)
        known = self._chat_templates.get(with_tools)
        if known is None or known.source is not source:  # users may replace the tokenizer's template at any time
            special = self.tokenizer.special_tokens_map
            known = ChatTemplate(source, tuple((name, str(token)) for name, token in special.items()))
            self._chat_templates[with_tools] = known
        return known

    def _template_source(self, with_tools: bool) -> str:
        templates = self.tokenizer.chat_template
        if not templates:
            raise UnsupportedError(f"{self.model_id}: its tokenizer has no chat template; use_chat_template=False")
        if isinstance(templates, str):
            return templates
        name = "tool_use" if with_tools and "tool_use" in templates else "default"
        if name not in templates:
            raise UnsupportedError(f"{self.model_id}: no default among its chat templates {sorted(templates)}")
        return str(templates[name])

    def _tokenize(
        self, trajectories: Sequence[Row], rendered: Sequence[Rendered], add_generation_prompt: bool
    ) -> list[Row]:
        """Encode all texts in one call of the tokenizer. The labels are not shifted yet."""
        if not rendered:
            return []
        # a chat template writes the special tokens itself
        special = not self.use_chat_template
        encodings = encode_texts(self.tokenizer.backend_tokenizer, [text.text for text in rendered], special)
        features = []
        for trajectory, turns, encoding in zip(trajectories, rendered, encodings, strict=True):
            ids: IntArray = np.array(encoding.ids, dtype=np.int64)
            if add_generation_prompt:
                labels = np.full(len(ids), IGNORE, dtype=np.int64)
            else:
                labels = label_spans(encoding, ids, turns) if self.use_chat_template else ids.copy()
            feature = {**trajectory, "input_ids": ids, "labels": labels}
            images = images_of(trajectory) if self.is_mm else []
            if images:
                feature = self._images.add_images(feature, images, self.image_source, decode=self.decodes_images)
            features.append(feature)
        return features

    # --- the pipelines ----------------------------------------------------------------------------------------------

    def _invoke_pre_pipeline(self, trajectories: list[Row]) -> list[Row]:
        trajectories = [{**trajectory, "messages": conversation(trajectory)} for trajectory in trajectories]
        return self._run(self.pre_pipeline_names, trajectories)

    def _invoke_post_pipeline(self, features: list[Row]) -> list[Row]:
        """Truncate features, add masks and positions, shift the labels. The labels given must be unshifted."""
        return self._run(self.post_pipeline_names, features)

    def _run(self, names: Sequence[str], rows: list[Row]) -> list[Row]:
        for name in names:
            step: Callable[[Row], list[Row]] = getattr(self, name)
            rows = [result for row in rows for result in step(row)]
        return rows

    def _add_default_system(self, trajectory: Row) -> list[Row]:
        if not self.use_chat_template or self.default_system is None:
            return [trajectory]
        return [with_system(trajectory, self.default_system)]

    def _extract_reasoning(self, trajectory: Row) -> list[Row]:
        split = self.use_chat_template and bool(self._chat_template(bool(trajectory.get("tools"))).reasoning_fields)
        return [{**trajectory, "messages": [split_reasoning(message, split) for message in trajectory["messages"]]}]

    def _build_standard_messages(self, trajectory: Row) -> list[Row]:
        if self.is_mm:
            refuse_unread(trajectory)
            return [with_image_blocks(trajectory, self.image_placeholder, self._open_image)]
        refuse_media(trajectory)
        return [{**trajectory, "messages": [plain_text(message) for message in trajectory["messages"]]}]

    def _open_image(self, image: object, field: str) -> object:
        return (self.image_source.read if self.decodes_images else self.image_source.open)(image, field)

    def _check_max_length(self, feature: Row) -> list[Row]:
        if not self.max_length or len(feature["input_ids"]) <= self.max_length:
            return [feature]
        places = self._images.places(feature) if self.is_mm and _has_images(feature) else []
        return truncate(feature, self.max_length, self.truncation_strategy, places)

    def _add_attention_fields(self, feature: Row) -> list[Row]:
        length = len(feature["input_ids"])
        feature = {**feature, "attention_mask": np.ones(length, dtype=np.int64)}
        return [{**self.set_mm_position_ids(feature), "length": length}]

    def _roll_labels(self, feature: Row) -> list[Row]:
        return [{**feature, "labels": shift_labels(feature["labels"])}]

    def set_mm_position_ids(self, feature: Row) -> Row:
        """Add ``position_ids``: (T,), or for a row with images (4, 1, T): in the text, then time, row and column."""
        if self.is_mm and _has_images(feature):
            return {**feature, "position_ids": self._images.positions(feature)}
        return {**feature, "position_ids": np.arange(len(feature["input_ids"]), dtype=np.int64)}

    def _require_one_for_one(self, what: str) -> None:
        if self.truncation_strategy == "split":
            raise InvalidInputError("truncation_strategy", "split", f"another one for {what}: one row must stay one")

    # --- around encoding --------------------------------------------------------------------------------------------

    def format_trajectory(self, trajectory: Mapping[str, Any], add_default_system: bool = False) -> Row:
        """Return the trajectory as it is just before rendering, by default without the default system message."""
        names = [name for name in self.pre_pipeline_names if add_default_system or name != "_add_default_system"]
        prepared = {**trajectory, "messages": conversation(trajectory)}
        return self._run(names, [prepared])[0]

    def concat_input_feature(self, feature: Mapping[str, Any], new_tokens: Sequence[int]) -> Row:
        """Return the feature with newly generated tokens appended. All of these tokens are learnt.

        If the feature has ``messages``, the assistant's message is appended to them, with tool calls extracted from its
        text.
        """
        self._require_one_for_one("concat_input_feature")
        if "input_ids" not in feature:
            raise InvalidInputError("feature", sorted(feature), "an encoded one, with 'input_ids'")
        ids = np.asarray(feature["input_ids"], dtype=np.int64)
        new: IntArray = np.asarray(new_tokens, dtype=np.int64)
        labels = np.asarray(feature.get("labels", np.full(len(ids), IGNORE)), dtype=np.int64)
        grown = dict(feature)
        if self.is_mm and _has_images(feature):  # an image token that the model has drawn is text
            feature = {**feature, "mm_token_type_ids": self._images.types(feature)}
        grown["input_ids"] = np.concatenate([ids, new])
        grown["labels"] = np.concatenate([unshift_labels(labels), new])
        for key, value in (("mm_token_type_ids", 0), ("completion_mask", 1)):
            if feature.get(key) is not None:
                old = np.asarray(feature[key], dtype=np.int64)
                grown[key] = np.concatenate([old, np.full(len(new), value, dtype=np.int64)])
        if feature.get("messages"):
            grown["messages"] = [*feature["messages"], self._assistant_message(new_tokens)]
        features = self._invoke_post_pipeline([grown])
        if not features:
            raise InvalidInputError(
                "new_tokens", f"{len(grown['input_ids'])} tokens in all", f"at most max_length {self.max_length}"
            )
        return features[0]

    def _assistant_message(self, tokens: Sequence[int]) -> Row:
        text, whole = self.decode(tokens, skip_special_tokens=True), self.decode(tokens)
        if len(whole) > _MOST_CHARACTERS:
            return {"role": "assistant", "content": text}
        for written in dict.fromkeys((text, whole)):  # in some vocabularies the tags of a call are special tokens
            calls = self.parse_tool_call(written)
            if calls:
                content = self.clean_tool_call(written)
                for token in self.tokenizer.all_special_tokens:
                    content = content.replace(token, "")
                return {"role": "assistant", "content": content.rstrip(), "tool_calls": calls}
        return {"role": "assistant", "content": text}

    def check(self, trajectory: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the trajectory if it can be encoded to at least one token, else None; a UserError is logged."""
        try:
            features = self._encode_rows([trajectory], False, True, {})[0]
        except UserError as error:
            _logger.warning("trajectory cannot be encoded: %s", error)
            return None
        return trajectory if any(len(feature["input_ids"]) for feature in features) else None

    def batch_check(self, trajectories: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
        return [self.check(trajectory) for trajectory in trajectories]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def batch_decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in token_ids]

    def parse_tool_call(self, text: str) -> list[ToolCall]:
        """Return the tool calls in an assistant's text, read in the first format that recognises it."""
        parser = ToolCallRegistry.detect_first(text)
        return parser.parse(text) if parser else []

    def clean_tool_call(self, text: str) -> str:
        """Return the text without its tool calls."""
        parser = ToolCallRegistry.detect_first(text)
        return parser.clean(text) if parser else text.rstrip()

    def add_images(self, feature: Mapping[str, Any]) -> Row:
        """Return an encoded row with what its images, given beside its tokens, become (:func:`images_of`).

        Its tokens have one image token for each image, or all of them. A row that has pixels already is unchanged.
        """
        images = images_of(feature)
        if not images or feature.get("pixel_values") is not None:
            return dict(feature)
        if not self.is_mm:
            raise UnsupportedError(f"images: {self.model_id} reads text only")
        opened = [self._open_image(image, f"images[{number}]") for number, image in enumerate(images)]
        grown = self._images.add_images(dict(feature), opened, self.image_source, decode=self.decodes_images)
        (row,) = self._add_attention_fields(grown)
        return row

    def preprocess_image(self, image: object) -> "PillowImage":
        """Return an image, given in any form (:class:`twinkle.images.ImageSource`), in RGB."""
        return self.image_source.read(image)

    def preprocess_images(self, images: Sequence[object]) -> "list[PillowImage]":
        return [self.image_source.read(image, f"images[{number}]") for number, image in enumerate(images)]

    def preprocess_video(self, video: object) -> None:
        raise UnsupportedError("videos: cannot be encoded; allowed: text and images")

    def preprocess_audio(self, audio: object) -> None:
        raise UnsupportedError("audios: cannot be encoded; allowed: text and images")

    preprocess_videos = preprocess_video
    preprocess_audios = preprocess_audio

    def get_vllm_input_ids(self, input_ids: Sequence[int]) -> Sequence[int]:
        """Return the prompt for vLLM, which expands image placeholders itself. Text is unchanged."""
        return input_ids

    def pre_forward_hook(self, model: object, args: tuple[Any, ...], kwargs: Row) -> tuple[tuple[Any, ...], Row]:
        """Return the arguments of a model's forward before it runs; subclasses may change them."""
        return args, kwargs

    map_col_to_row = staticmethod(columns_to_rows)
    map_row_to_col = staticmethod(rows_to_columns)


_FEATURE_KEYS = ("input_ids", "labels", "attention_mask", "position_ids", "length")


def _has_images(row: Mapping[str, Any]) -> bool:
    return row.get("image_grid_thw") is not None
