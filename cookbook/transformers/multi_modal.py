"""Supervised fine-tuning of a vision model with LoRA: a small model learns to see colours, in minutes of CPU time.

    python cookbook/transformers/multi_modal.py [--epochs 10]

The base model and its vision tower stay frozen; PEFT adapters on the linear layers of the decoder are trained, with
plain autograd and torch's AdamW. The script draws its pictures itself: shapes in four colours. The default model has
random weights and knows nothing, so it chooses the right one of four colours in a quarter of the cases. Other rows with
the columns `image` and `text` come from a hub, for example
`--data ms://AI-ModelScope/LaTeX_OCR --question "Write this formula in LaTeX."`; there the other three choices are the
texts of other pictures.

TWINKLE_MODEL sets another model: a folder, hf://Qwen/Qwen3-VL-4B-Instruct, ms://…
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import peft
from tqdm import tqdm

import twinkle
from twinkle.data_format import Trajectory
from twinkle.dataloader import DataLoader
from twinkle.dataset import DatasetMeta, LazyDataset
from twinkle.model import TransformersModel
from twinkle.preprocessor import Preprocessor

sys.path.append(str(Path(__file__).parents[1] / "data"))
from draw_pictures import drawn_rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "random://qwen3-vl-tiny"))
parser.add_argument("--data", default="drawn", help="drawn, or rows with image and text: hf://…, ms://…, a path")
parser.add_argument("--question", default="Colour?", help="what the model is asked about each picture")
parser.add_argument("--rows", type=int, default=160, help="pictures to train on")
parser.add_argument("--test", type=int, default=64, help="held-out pictures")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--learning-rate", type=float, default=1e-2)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--seed", type=int, default=0, help="seed of the pictures, the adapter and the order of rows")
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--curve", type=Path, help="write losses and accuracies here, as JSON")
parser.add_argument("--output", default="build/cookbook")
args = parser.parse_args()
for name, least in {"rows": 1, "test": 1, "epochs": 1, "batch_size": 1}.items():
    if (value := vars(args)[name]) < least:
        parser.error(f"--{name.replace('_', '-')}: got {value}, allowed: {least} or more")

twinkle.initialize(seed=args.seed)  # the seed sets initial weights and row order

# --- data: a picture and a text → a conversation → tokens, labels and patches -----------------------------------------


def load(part: range) -> LazyDataset:
    """Return rows with the columns image and text. They are decoded and encoded when they are read."""
    if args.data == "drawn":
        return LazyDataset(DatasetMeta(data=drawn_rows(args.rows + args.test, args.seed), data_slice=part))
    return LazyDataset(DatasetMeta(args.data, data_slice=part))


def conversation(image: object, text: str) -> Trajectory:
    """Ask about the picture. `<image>` is where it stands in the text."""
    question = {"role": "user", "content": f"<image>{args.question}", "images": [image]}
    return {"messages": [question, {"role": "assistant", "content": text}]}


class PictureProcessor(Preprocessor):
    def __call__(self, columns: dict[str, list]) -> dict[str, list]:
        rows = self.map_col_to_row(columns)
        return self.map_row_to_col([conversation(row["image"], row["text"]) for row in rows])


dataset, test = load(range(args.rows)), list(load(range(args.rows, args.rows + args.test)))
dataset.set_template("Qwen3_5Template", model_id=args.model, max_length=512)
dataset.map(PictureProcessor, remove_columns=["image", "text"])
dataset.encode()  # labels are the assistant's tokens; the patches of a picture are a part of its row
dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
steps = args.epochs * len(dataloader)

# --- model, adapter, optimizer ----------------------------------------------------------------------------------------

model = TransformersModel(model_id=args.model, mixed_precision=args.precision)
model.add_adapter_to_model("eyes", peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0)
model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=10, num_training_steps=steps)
print(model.get_train_configs())

# --- the test: is the right text the likeliest of four? ---------------------------------------------------------------

texts = sorted({row["text"] for row in test})
if len(texts) < 4:
    parser.error(f"--test: the {args.test} pictures have {len(texts)} different texts, needed: 4 to choose from")
generator = random.Random(args.seed)
choices = [[row["text"], *generator.sample([text for text in texts if text != row["text"]], 3)] for row in test]
chats = [conversation(row["image"], text) for row, four in zip(test, choices, strict=True) for text in four]


def show(title: str) -> float:
    """Print and return the share of held-out pictures whose right text, the first of four, is the likeliest."""
    logps = model.forward_only(inputs=dataset.template.batch_encode(chats), micro_batch_size=64)["logps"]
    scores = np.array([float(row.sum()) for row in logps]).reshape(-1, 4)  # logps are 0 where nothing is predicted
    share = float(np.mean(scores.argmax(axis=1) == 0))
    print(f"{title}: {share:.0%} of {len(test)} choices are right")
    for four, choice in list(zip(choices, scores.argmax(axis=1), strict=True))[:4]:
        print(f"  a picture of {four[0]!r}: {four[choice]!r}")
    return share


before = show("before")

# --- the loop ---------------------------------------------------------------------------------------------------------

losses = []
progress = tqdm(total=steps, desc="SFT with pictures", unit="step")
for _ in range(args.epochs):
    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step(max_grad_norm=1.0)  # clips, steps, and advances the learning rate
        metrics = model.calculate_metric(is_training=True)
        losses.append(float(metrics["loss"]))
        progress.set_postfix(loss=metrics["loss"], lr=metrics["learning rate"])
        progress.update()
progress.close()

after = show("after")
print("saved", model.save("multi_modal", output_dir=args.output))
if args.curve:
    args.curve.write_text(json.dumps({"loss": losses, "accuracy": [before, after]}))
