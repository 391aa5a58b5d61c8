"""Teach a model to see: pictures go to the server, words come back.

    twinkle-server launch --model random://qwen3-vl-tiny     # in another terminal; the SDK waits until it answers
    python cookbook/client/tinker/self_host/multi_modal.py [--epochs 10]

The script draws its pictures itself: shapes in four colours. The default model has random weights and knows nothing, so
it chooses the right one of four colours in a quarter of the cases. Its vision tower stays as it is; the adapter learns
to read what the tower says. Prints the share of held-out pictures with the right choice, and some answers, before and
after: two minutes on two CPU cores. Other rows with the columns `image` and `text` come from a hub, for example
`--data ms://AI-ModelScope/LaTeX_OCR --question "Write this formula in LaTeX."`; there the other three choices are the
texts of other pictures. For a useful model: TWINKLE_MODEL=Qwen/Qwen3-VL-4B-Instruct, and the same for `launch --model`.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model.
"""

import argparse
import io
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import tinker
from PIL import Image
from tinker import types
from transformers import AutoImageProcessor

sys.path.append(str(Path(__file__).parents[3] / "data"))
from draw_pictures import drawn_rows

BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "tml-local")
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

if args.data == "drawn":
    rows = drawn_rows(args.rows + args.test, args.seed)
else:
    from twinkle.dataset import Dataset, DatasetMeta

    rows = list(Dataset(DatasetMeta(args.data, data_slice=range(args.rows + args.test))))
train, test = rows[: args.rows], rows[args.rows :]

texts = sorted({row["text"] for row in test})
if len(texts) < 4:
    parser.error(f"--test: the {args.test} pictures have {len(texts)} different texts, needed: 4 to choose from")

service = tinker.ServiceClient(base_url=BASE_URL, api_key=API_KEY)
training = service.create_lora_training_client(base_model=MODEL, rank=args.rank, seed=args.seed, train_unembed=False)
tokenizer = training.get_tokenizer()
# The server prepares the pictures. Here the model's image processor only says how many tokens a picture becomes.
processor = AutoImageProcessor.from_pretrained(tokenizer.name_or_path, backend="pil")

# --- data: a picture and a text → a prompt, and a datum ---------------------------------------------------------------

messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": args.question}]}]
chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
# One image token in the text stands for all tokens of the picture; they lie between start and end of an image.
before_image, after_image = (tokenizer.encode(part, add_special_tokens=False) for part in chat.split("<|image_pad|>"))


def image_chunk(image: Image.Image) -> types.ImageChunk:
    image, file = image.convert("RGB"), io.BytesIO()
    image.save(file, "PNG")
    tokens = processor.get_number_of_image_patches(image.height, image.width, {}) // processor.merge_size**2
    return types.ImageChunk(data=file.getvalue(), format="png", expected_tokens=tokens)


def prompt(image: types.ImageChunk, answer: list[int]) -> types.ModelInput:
    text = types.EncodedTextChunk(tokens=after_image + answer)
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=before_image), image, text])


def make_datum(image: types.ImageChunk, text: str) -> types.Datum:
    """Train on the answer and the end of the turn. Targets have an entry for each token of the picture, too."""
    answer = tokenizer.encode(text + tokenizer.eos_token, add_special_tokens=False)
    context = len(before_image) + image.expected_tokens + len(after_image) - 1
    weights = [0.0] * context + [1 / len(answer)] * len(answer)  # every picture has the same weight
    targets = [0] * context + answer
    return types.Datum(
        model_input=prompt(image, answer[:-1]), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )


# --- the test: is the right text the likeliest of four? ---------------------------------------------------------------

shuffle = random.Random(args.seed)
held_out = []  # of each picture its chunk and four texts, the right one first
for row in test:
    others = shuffle.sample([text for text in texts if text != row["text"]], 3)
    held_out.append((image_chunk(row["image"]), [row["text"], *others]))


def accuracy() -> float:
    """Return the share of held-out pictures whose right text is likelier than the other three."""
    data = [make_datum(image, text) for image, choices in held_out for text in choices]
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    scores = [
        output["logprobs"].to_numpy()[datum.loss_fn_inputs["weights"].to_numpy() > 0].sum()
        for output, datum in zip(outputs, data, strict=True)
    ]
    return float(np.mean(np.reshape(scores, (-1, 4)).argmax(axis=1) == 0))


def show(title: str, share: float, sampler: tinker.SamplingClient) -> list[str]:
    """Print and return what the model says about the first pictures when nothing is given to choose from."""
    print(f"{title}: {share:.0%} of {len(test)} choices are right")
    greedy = types.SamplingParams(max_tokens=16, temperature=0.0)
    futures = [sampler.sample(prompt(image, []), 1, greedy) for image, _ in held_out[:8]]
    tokens = [future.result().sequences[0].tokens for future in futures]
    answers = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
    for row, answer in zip(test, answers, strict=False):
        print(f"  a picture of {row['text']!r}: {answer!r}")
    return answers


before = accuracy()
said_before = show("before", before, service.create_sampling_client(base_model=MODEL))

# --- the loop ---------------------------------------------------------------------------------------------------------

data = [make_datum(image_chunk(row["image"]), row["text"]) for row in train]
batches = []
for _ in range(args.epochs):
    shuffle.shuffle(data)
    batches += [data[i : i + args.batch_size] for i in range(0, len(data), args.batch_size)]

losses = []
for step, batch in enumerate(batches):
    # Warm up in ten steps, then fall to 0. The server computes the features of a picture once; later epochs reuse them.
    rate = args.learning_rate * min(1, (step + 1) / 10) * (1 - step / len(batches))
    forward_backward = training.forward_backward(batch, "cross_entropy")
    optim_step = training.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0))
    losses.append(forward_backward.result().metrics["loss:sum"] / len(batch))
    optim_step.result()
    print(f"step {step + 1:3} of {len(batches)}: loss {losses[-1]:.4f}")

after = accuracy()
said_after = show("after", after, training.save_weights_and_get_sampling_client())
print("saved", training.save_state("multi-modal").result().path)
if args.curve:
    said = [said_before, said_after]
    args.curve.write_text(json.dumps({"loss": losses, "accuracy": [before, after], "said": said}))
service.close("success").result()
