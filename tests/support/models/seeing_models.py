"""Tiny random vision models, one for each family, and pictures for them."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel, Qwen2VLImageProcessorPil

from tests.support.models.tiny_models import draw_lasting_decay
from twinkle.images import EncodedImage, ImageProcessing
from twinkle.model.types import Datum, Image

VOCAB = 97
IMAGE = 90  # the token that stands for a part of an image
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.15,
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def _config(name: str, text: Mapping[str, object], vision: Mapping[str, object]) -> PreTrainedConfig:
    return getattr(transformers, name)(text_config={**_TEXT, **text}, vision_config={**_VISION, **vision}, **_TOKENS)


def _rope(sections: Sequence[int], **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}


_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "rope_parameters": _rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

SEEING: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen2_5_vl": lambda: _config(
        "Qwen2_5_VLConfig",
        {"rope_parameters": _rope([1, 2, 1])},
        {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
    ),
    "qwen3_vl": lambda: _config(
        "Qwen3VLConfig",
        {"head_dim": 16, "rope_parameters": _rope([4, 2, 2], mrope_interleaved=True)},
        {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    ),
    "qwen3_5": lambda: _config(
        "Qwen3_5Config",
        _LINEAR,
        {"patch_size": 16, "num_position_embeddings": 64},
    ),
}

# The tests of adapters on experts have a reference of their own.
SEEING_WITH_EXPERTS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_vl_moe": lambda: _config(
        "Qwen3VLMoeConfig",
        {
            "head_dim": 16,
            "rope_parameters": _rope([4, 2, 2], mrope_interleaved=True),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    ),
}


def _qwen3_5_moe() -> PreTrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _config(
        "Qwen3_5MoeConfig",
        {**_LINEAR, **experts, "shared_expert_intermediate_size": 16},
        {"patch_size": 16, "num_position_embeddings": 64},
    )


def _qwen2_vl() -> PreTrainedConfig:
    """Return a model with a vision tower whose images we do not place."""
    vision = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    return _config("Qwen2VLConfig", {"rope_parameters": _rope([1, 2, 1])}, vision)


def seeing_model(family: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = {"qwen2_vl": _qwen2_vl, "qwen3_5_moe": _qwen3_5_moe, **SEEING, **SEEING_WITH_EXPERTS}[family]()
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    draw_lasting_decay(parameter)
                elif parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


# The sections of rotary embeddings (time, row, column) of models whose heads are wide enough for fused kernels.
WIDE = {"qwen2_5_vl": [4, 6, 6], "qwen3_vl": [6, 5, 5]}


def wide_seeing_model(family: str) -> PreTrainedModel:
    """Return a model with hidden size 128 and heads of 32."""
    config = SEEING[family]()
    text, config.vision_config.out_hidden_size = config.text_config, 128
    text.hidden_size, text.head_dim = 128, 32
    text.rope_parameters = text.rope_parameters | {"mrope_section": WIDE[family]}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def image_processor(patch_size: int = 16) -> Qwen2VLImageProcessorPil:
    side = (2 * patch_size) ** 2
    return Qwen2VLImageProcessorPil(patch_size=patch_size, size={"shortest_edge": side, "longest_edge": 30 * side})


def processing_of(model: PreTrainedModel) -> ImageProcessing:
    return ImageProcessing(image_processor(model.config.vision_config.patch_size))


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def png(pixels: NDArray[np.uint8]) -> EncodedImage:
    written = io.BytesIO()
    Pillow.fromarray(pixels).save(written, "PNG")
    return EncodedImage(written.getvalue(), "png")


def seeing_datum(model: PreTrainedModel, sizes: Sequence[tuple[int, int]], seed: int = 0, text: int = 4) -> Datum:
    """Return a sequence with pictures of these heights and widths, ``text`` tokens around each, and random targets."""
    generator, processing = np.random.default_rng(seed), processing_of(model)
    tokens, images = list(generator.integers(3, IMAGE, text)), []
    for number, size in enumerate(sizes):
        encoded = png(picture(*size, seed=100 * seed + number))
        patches, tiles = processing.patches(encoded)
        digest = hashlib.sha256(encoded.data).hexdigest()
        images.append(Image(len(tokens), tiles.rows, tiles.columns, digest, patches))
        tokens += [IMAGE] * tiles.tokens + list(generator.integers(3, IMAGE, text + number))
    targets = generator.integers(3, IMAGE, len(tokens))
    weights = generator.random(len(tokens)).astype(np.float32)
    return Datum(np.array(tokens), targets, weights, images=images)
