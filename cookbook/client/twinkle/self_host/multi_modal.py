"""Teach a model to see, on a server or in this process, with the same script; only the imports differ.

    twinkle-server launch --model random://qwen3-vl-tiny     # in another terminal
    python cookbook/client/twinkle/self_host/multi_modal.py [--epochs 10]

Write `twinkle` instead of `twinkle_client` in the four imports below, and the script trains here, without a server.
With a server, conversations go there with their pictures as PNG files; the server's template encodes both.

The script draws its pictures itself: shapes in four colours. The default model has random weights and knows nothing, so
it chooses the right one of four colours in a quarter of the cases. Its vision tower stays as it is; the adapter learns
to read what the tower says. Prints the share of held-out pictures with the right choice, and some answers, before and
after: two minutes on two CPU cores. Other rows with the columns `image` and `text` come from a hub, for example
`--data ms://AI-ModelScope/LaTeX_OCR --question "Write this formula in LaTeX."`; there the other three choices are the
texts of other pictures. For a useful model: TWINKLE_MODEL=Qwen/Qwen3-VL-4B-Instruct, and the same for `launch --model`.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import numpy as np

from twinkle_client import initialize
from twinkle_client.data_format import SamplingParams
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import LocalSampler

sys.path.append(str(Path(__file__).parents[3] / "data"))
from draw_pictures import drawn_rows

MODEL = os.environ.get("TWINKLE_MODEL", "random://qwen3-vl-tiny")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="drawn", help="drawn, or rows with image and text: hf://…, ms://…, a path")
parser.add_argument("--question", default="Colour?", help="what the model is asked about each picture")
parser.add_argument("--rows", type=int, default=160, help="pictures to train on")
parser.add_argument("--test", type=int, default=64, help="held-out pictures")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--learning-rate", type=float, default=1e-2)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--seed", type=int, default=0, help="seed of the pictures, the adapter and the order of rows")
parser.add_argument("--curve", type=Path, help="write losses, accuracies and answers here, as JSON")
args = parser.parse_args()
for name, least in {"rows": 1, "test": 1, "epochs": 1, "batch_size": 1}.items():
    if (value := vars(args)[name]) < least:
        parser.error(f"--{name.replace('_', '-')}: got {value}, allowed: {least} or more")

ADAPTER = "eyes"

# --- data: a picture and a text → a conversation ----------------------------------------------------------------------

if args.data == "drawn":
    rows = drawn_rows(args.rows + args.test, args.seed)
else:
    from twinkle.dataset import Dataset, DatasetMeta  # read here, not on the server: the rows have pictures

    rows = list(Dataset(DatasetMeta(args.data, data_slice=range(args.rows + args.test))))
train, test = rows[: args.rows], rows[args.rows :]
texts = sorted({row["text"] for row in test})
if len(texts) < 4:
    parser.error(f"--test: the {args.test} pictures have {len(texts)} different texts, needed: 4 to choose from")


def conversation(row: dict, text: str | None = None) -> dict:
    """Return a conversation about a picture, or only the question. `<image>` is where the picture stands in the text.

    A picture may be a PIL image, the bytes of a file in a dict, base64, a path or a URL.
    """
    question = [{"role": "user", "content": f"<image>{args.question}"}]
    answer = [] if text is None else [{"role": "assistant", "content": text}]
    return {"messages": question + answer, "images": [row["image"]]}


# --- model, adapter, optimizer ----------------------------------------------------------------------------------------

initialize(seed=args.seed)
batches = []
shuffle = random.Random(args.seed)
for _ in range(args.epochs):
    shuffle.shuffle(train)
    batches += [train[i : i + args.batch_size] for i in range(0, len(train), args.batch_size)]

model = MultiLoraTransformersModel(model_id=MODEL)
lora = {"r": args.rank, "lora_alpha": 32, "target_modules": "all-linear"}  # or peft.LoraConfig
model.add_adapter_to_model(ADAPTER, lora, seed=args.seed)
model.set_template("Qwen3_5Template", model_id=MODEL, adapter_name=ADAPTER)
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0, adapter_name=ADAPTER)
model.set_lr_scheduler(
    "LinearWarmupScheduler", num_warmup_steps=10, num_training_steps=len(batches), adapter_name=ADAPTER
)
sampler = LocalSampler(model)
sampler.set_template("Qwen3_5Template", model_id=MODEL)

# --- the test: is the right text the likeliest of four? ---------------------------------------------------------------

choices = [[row["text"], *shuffle.sample([text for text in texts if text != row["text"]], 3)] for row in test]


def accuracy() -> float:
    """Return the share of held-out pictures whose right text, the first of four, is likelier than the other three."""
    inputs = [conversation(row, text) for row, four in zip(test, choices, strict=True) for text in four]
    logps = model.forward_only(inputs=inputs, adapter_name=ADAPTER)["logps"]  # 0 where nothing is predicted
    scores = np.array([float(sum(row)) for row in logps])
    return float(np.mean(scores.reshape(-1, 4).argmax(axis=1) == 0))


def show(title: str, share: float, adapter_name: str | None) -> list[str]:
    """Print and return what the model says about the first pictures when nothing is given to choose from."""
    print(f"{title}: {share:.0%} of {len(test)} choices are right")
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    responses = sampler.sample([conversation(row) for row in test[:8]], greedy, adapter_name=adapter_name)
    answers = [response.sequences[0].new_input_feature["messages"][-1]["content"] for response in responses]
    for row, answer in zip(test, answers, strict=False):
        print(f"  a picture of {row['text']!r}: {answer!r}")
    return answers


before = accuracy()
said_before = show("before", before, None)

# --- the loop ---------------------------------------------------------------------------------------------------------

losses = []
for step, batch in enumerate(batches):
    # The features of a picture are computed once; later epochs reuse them.
    inputs = [conversation(row, row["text"]) for row in batch]
    model.forward_backward(inputs=inputs, adapter_name=ADAPTER)
    model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=ADAPTER)
    losses.append(float(model.calculate_metric(is_training=True, adapter_name=ADAPTER)["loss"]))
    print(f"step {step + 1:3} of {len(batches)}: loss {losses[-1]:.4f}")

after = accuracy()
said_after = show("after", after, ADAPTER)
print("saved", model.save("multi-modal", adapter_name=ADAPTER, save_optimizer=True))
if args.curve:
    said = [said_before, said_after]
    args.curve.write_text(json.dumps({"loss": losses, "accuracy": [before, after], "said": said}))
