"""Training many tenants on images: tokens/s, and what the vision tower costs with and without kept features.

Each tenant has sequences of one image and some text. A step is one fused forward and backward pass of all tenants, and
an AdamW step of each. The kinds of steps take turns in one process, and times are medians after a warm-up:

- kept: all images were seen before, as in every epoch but the first.
- new: no image was seen before, so the vision tower runs on all of them.
- text: sequences of the same lengths without images, on the vision model and on the text model of the same decoder.

The tower's share of a step with new images is 1 - kept / new. It includes making patches and moving them to the device.
Both models compute in micro-batches of at most ``--max-tokens``, and both must have room for the optimizer states of
all tenants. The tower leaves less memory for either: the two models would be compared at different work.

    python benchmarks/vision_training.py --json build/bench/vision_training.json
    python benchmarks/vision_training.py --tenants 2 --images 2 --side 96 --text 8 --repeats 2
"""

import argparse
import io
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_gpu import machine
from PIL import Image as Pillow

from twinkle import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult, hub
from twinkle.images import EncodedImage, ImageProcessing
from twinkle.model.types import Image

ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
WARM_UP = 3
GIB = 2**30
_SHARE = 0.47  # of the GPU's memory, for each model


def main() -> None:
    args = parse_arguments()
    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "compiled": args.compiled}
    options["max_tokens_per_batch"] = args.max_tokens
    if is_cuda(args):  # each model gets the same share of the GPU
        options["memory_budget_bytes"] = int(_SHARE * torch.cuda.mem_get_info()[0])
    seeing = load(args, args.model, options)
    reading = load(args, args.text_model, options)
    if reading.vision is not None:
        raise SystemExit(f"--text-model: got {args.text_model}, which sees images, allowed: one that reads text only")
    kept = make_items(args, seeing)
    if is_cuda(args):
        require_room(args, seeing, reading)
    text = without_images(kept, seeing)
    tokens = sum(len(datum.tokens) for item in kept for datum in item.data)
    of_images = sum(image.tokens for item in kept for datum in item.data for image in datum.images)
    print(f"{args.tenants} tenants × {args.images} images of {args.side} × {args.side}: {tokens} tokens", flush=True)
    print(f"{of_images} of them are of images; rank {args.rank}, {args.dtype}", flush=True)
    fresh = new_images(kept)
    seconds = measure(
        args,
        {
            "images kept": lambda: step(seeing, kept),
            "images new": lambda: step(seeing, next(fresh)),
            "text on the vision model": lambda: step(seeing, text),
            "text on the text model": lambda: step(reading, text),
        },
    )
    rows = {
        name: {"step_s": statistics.median(taken), "tokens_per_s": tokens / statistics.median(taken), "steps_s": taken}
        for name, taken in seconds.items()
    }
    numbers = seeing.numbers()
    report = {
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "machine": machine(args.device),
        "tokens": tokens,
        "image_tokens": of_images,
        "rows": rows,
        "tower_share_of_a_step_with_new_images": 1 - rows["images kept"]["step_s"] / rows["images new"]["step_s"],
        "tower_s": tower_seconds(args, seeing, fresh),
        "vision_over_text_model": rows["text on the vision model"]["tokens_per_s"]
        / rows["text on the text model"]["tokens_per_s"],
        "images_seen": numbers.images_seen,
        "images_reused": numbers.images_reused,
        "peak_gib_of_both": torch.cuda.max_memory_allocated() / GIB if is_cuda(args) else None,
    }
    print_table(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    size = "8b" if cuda else "tiny"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=f"random://qwen3-vl-{size}", help="the id of a vision model")
    parser.add_argument("--text-model", default=f"random://qwen3-{size}", help="a text model of the same decoder")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--images", type=int, default=4, help="sequences with an image, of each tenant")
    parser.add_argument("--side", type=int, default=448 if cuda else 256, help="height and width of an image in pixels")
    parser.add_argument("--text", type=int, default=60, help="tokens of text in a sequence")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=1536, help="tokens of a micro-batch")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16" if cuda else "fp32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--compiled", action="store_true", help="compile the decoder layers of both models")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each kind")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    limits = {"tenants": 1, "images": 1, "side": 1, "text": 2, "rank": 1, "max_tokens": 1, "repeats": 1}
    for name, least in limits.items():
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option}: got {getattr(args, name)}, allowed: an integer ≥ {least}")
    return args


def load(args: argparse.Namespace, model_id: str, options: Mapping[str, Any]) -> Trainer:
    started = time.perf_counter()
    trainer = Trainer.from_pretrained(model_id, **options)
    for number in range(args.tenants):
        trainer.create_adapter(f"t{number}", LoraSpec(args.rank, seed=number, init_weights=False))
    print(f"{model_id}: start-up {time.perf_counter() - started:.1f} s; {trainer.memory}", flush=True)
    return trainer


def require_room(args: argparse.Namespace, *trainers: Trainer) -> None:
    """Stop unless each model has room for all tenants with their optimizer states: else its steps move them."""
    for trainer in trainers:
        room, _ = trainer.pool.capacity(trainer.pool.get("t0").layout)
        if room < args.tenants:
            raise SystemExit(
                f"--tenants: got {args.tenants}, but there is room for {room} of rank {args.rank} with their optimizer "
                f"states ({trainer.memory}); a smaller --max-tokens leaves more"
            )


def make_items(args: argparse.Namespace, trainer: Trainer) -> list[TrainItem]:
    """Return sequences with an image each, decoded and resized, as a server hands them to its trainer."""
    vision, processing = trainer.vision, ImageProcessing.from_folder(hub.resolve(args.model).path)
    if vision is None or processing is None:
        raise SystemExit(f"--model: {args.model} reads text only")
    size = processing.size_of(args.side, args.side)
    generator, before = np.random.default_rng(0), args.text // 2

    def sequence(tenant: int, number: int) -> Datum:
        written = io.BytesIO()
        noise = generator.integers(0, 256, (args.side, args.side, 3), dtype=np.uint8)
        Pillow.fromarray(noise).save(written, "PNG")
        pixels = processing.resized(EncodedImage(written.getvalue(), "png"))
        tokens = generator.integers(3, vision.image_token, args.text + size.tokens)
        tokens[before : before + size.tokens] = vision.image_token
        image = Image(before, size.rows, size.columns, f"{tenant}-{number}", pixels)
        weights = (tokens != vision.image_token).astype(np.float32)
        return Datum(tokens, np.where(weights, tokens, 0), weights, images=[image])

    return [
        TrainItem(f"t{tenant}", [sequence(tenant, number) for number in range(args.images)])
        for tenant in range(args.tenants)
    ]


def without_images(items: list[TrainItem], trainer: Trainer) -> list[TrainItem]:
    """Return sequences of the same lengths, with text in the places of images. The loss is on the same tokens."""
    assert trainer.vision is not None
    generator, limit = np.random.default_rng(1), trainer.vision.image_token

    def text_of(datum: Datum) -> Datum:
        tokens = generator.integers(3, limit, len(datum.tokens))
        return replace(datum, tokens=tokens, targets=tokens, images=())

    return [replace(item, data=[text_of(datum) for datum in item.data]) for item in items]


def new_images(items: list[TrainItem]) -> Iterator[list[TrainItem]]:
    """Yield the same sequences with images that no step has seen: the same pictures under new digests."""
    for number in itertools.count():
        yield [
            replace(item, data=[replace(datum, images=[renamed(datum.images[0], number)]) for datum in item.data])
            for item in items
        ]


def renamed(image: Image, number: int) -> Image:
    return replace(image, digest=f"{image.digest}-{number}")


def step(trainer: Trainer, items: list[TrainItem]) -> None:
    for result in trainer.forward_backward(items):
        assert isinstance(result, TrainResult), result
    for item in items:
        trainer.optim_step(item.adapter_id, ADAM)


def measure(args: argparse.Namespace, kinds: Mapping[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Return the seconds of steps of each kind, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(WARM_UP + args.repeats):
        for name, run in kinds.items():
            synchronize(args)
            started = time.perf_counter()
            run()
            synchronize(args)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def tower_seconds(args: argparse.Namespace, trainer: Trainer, fresh: Iterator[list[TrainItem]]) -> float:
    """Return the median seconds in which the tower alone computes the features of all images of a step."""
    store, taken = trainer.engine.features, []
    assert store is not None
    for _ in range(args.repeats):
        images = [image for item in next(fresh) for datum in item.data for image in datum.images]
        synchronize(args)
        started = time.perf_counter()
        store.get(images)
        synchronize(args)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def is_cuda(args: argparse.Namespace) -> bool:
    return str(args.device).startswith("cuda")


def synchronize(args: argparse.Namespace) -> None:
    if is_cuda(args):
        torch.cuda.synchronize()


def print_table(report: Mapping[str, Any]) -> None:
    print(f"\n{'':26} {'step':>11} {'tokens/s':>10}")
    for name, row in report["rows"].items():
        print(f"{name:26} {1000 * row['step_s']:8.1f} ms {row['tokens_per_s']:10.0f}")
    print(f"tower's share of a step with new images: {100 * report['tower_share_of_a_step_with_new_images']:.1f} %")
    print(f"tower alone, all images of a step: {1000 * report['tower_s']:.1f} ms")
    print(f"text on the vision model over the text model: {report['vision_over_text_model']:.3f}", flush=True)


if __name__ == "__main__":
    main()
