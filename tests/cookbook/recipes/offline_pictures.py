"""A tiny vision model with random weights, and drawn pictures in the place of Caltech 101.

tinker-cookbook takes a directory below the current one for the model or dataset of that name.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from twinkle.hub import resolve

VISION_MODEL = "Qwen/Qwen3.5-4B"
CLASSES = {"crimson_disc": (220, 20, 60), "azure_disc": (0, 127, 255), "olive_disc": (128, 128, 0)}
TRAIN, TEST = 8, 2  # pictures of each class
_SIDE = 64  # of a picture, in pixels


def write_vision_hub(folder: Path) -> Path:
    """Write the model and the pictures below a folder, and return the model's directory."""
    model = write_vision_model(folder / "model")
    (folder / VISION_MODEL).parent.mkdir(parents=True)
    (folder / VISION_MODEL).symlink_to(model)
    generator = np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("test", TEST)):
        for name, color in CLASSES.items():
            directory = folder / "dpdl-benchmark" / "caltech101" / split / name
            directory.mkdir(parents=True)
            for number in range(count):
                _draw(color, generator).save(directory / f"{number}.png")
    return model


def write_vision_model(folder: Path) -> Path:
    """Write random://qwen3.5-tiny with its weights, which tinker-cookbook wants to read."""
    source = resolve("random://qwen3.5-tiny").path
    shutil.copytree(source, folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _draw(color: tuple[int, int, int], generator: np.random.Generator) -> Image.Image:
    """Draw a disc of random size and place on a grey ground."""
    ground = int(generator.integers(150, 250))
    image = Image.new("RGB", (_SIDE, _SIDE), (ground, ground, ground))
    radius = int(generator.integers(16, 28))
    x, y = generator.integers(radius, _SIDE - radius, 2)
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return image
