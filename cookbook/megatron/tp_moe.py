"""Supervised fine-tuning of an adapter on a mixture of experts, with Megatron: each process has some of the experts.

Tensor and pipeline parallelism are those of tp.py. Expert parallelism divides the experts of a layer among the
processes that have the same layers: it adds no processes. The adapter trains the attention layers; with --experts also
the experts, each process those that it has. Routers are frozen. At the end the script writes the whole model, with the
adapter merged into its weights.

    torchrun --nproc-per-node 8 cookbook/megatron/tp_moe.py   # eight GPUs: dp 2, tp 2, pp 2, ep 2
    torchrun --nproc-per-node 4 cookbook/megatron/tp_moe.py   # four processes, also on a CPU: tp 2, pp 2, ep 2
    python cookbook/megatron/tp_moe.py --mode ray             # on eight workers of a Ray cluster

It needs the extra megatron. TWINKLE_MODEL sets another model: a folder, hf://…, ms://…
"""

import argparse
import json
import os
from pathlib import Path

import peft
from tqdm import tqdm

import twinkle
from twinkle import DeviceGroup, DeviceMesh, Platform, is_master
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import MegatronModel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "hf://Qwen/Qwen3-30B-A3B-Instruct-2507"))
parser.add_argument("--tp-size", type=int, default=2, help="processes that share each layer")
parser.add_argument("--pp-size", type=int, default=2, help="pipeline stages, each with a part of the layers")
parser.add_argument("--ep-size", type=int, default=2, help="processes among which the experts of a layer are divided")
parser.add_argument("--experts", action="store_true", help="train the experts, too")
parser.add_argument("--epochs", type=int, default=6, help="passes over 40 conversations; 8 others are held out")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--mode", choices=["local", "ray"], default="local", help="ray: run on workers of a Ray cluster")
parser.add_argument("--workers", type=int, default=8, help="number of training workers in mode ray")
parser.add_argument("--curve", type=Path, help="write the loss of each step here, as JSON")
parser.add_argument("--output", default="build/cookbook")
args = parser.parse_args()

NAME, AUTHOR = "Twinkle", "the Twinkle team"
DATA = Path(__file__).parents[1] / "data" / "self_cognition.jsonl"

# In mode ray, "model" is a group of processes that runs the model below. In other modes the name has no effect.
groups = [DeviceGroup("model", args.workers, Platform.device_prefix())] if args.mode == "ray" else None
world = args.workers if args.mode == "ray" else Platform.get_world_size()
# A model with experts is sequence parallel wherever it is tensor parallel: its processes also share the tokens between
# the parts of a layer that they share.
mesh = DeviceMesh.from_sizes(
    world_size=world,
    dp_size=max(1, world // (args.tp_size * args.pp_size)),
    tp_size=args.tp_size,
    pp_size=args.pp_size,
    ep_size=args.ep_size,
    sequence_parallel=True,
)
# Everything below that is given no device_mesh of its own uses this one. The seed sets initial weights and row order.
twinkle.initialize(args.mode, groups=groups, global_device_mesh=mesh, seed=42)

# --- data: rows → conversations → tokens and labels -------------------------------------------------------------------


def conversations(columns: dict[str, list[str]]) -> dict[str, list]:
    """Convert the columns of questions and answers to one column of messages."""
    answers = [answer.format(name=NAME, author=AUTHOR) for answer in columns["answer"]]
    pairs = zip(columns["question"], answers, strict=True)
    return {"messages": [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]}


def load(rows: range, *, shuffle: bool) -> DataLoader:
    """Return batches of these rows. Processes that hold cuts of one model get the same rows."""
    dataset = Dataset(DatasetMeta(str(DATA), data_slice=rows))
    dataset.set_template("Template", model_id=args.model, max_length=256)
    dataset.map(conversations, remove_columns=["question", "answer"])
    dataset.encode()  # labels are the assistant's tokens; the rest is only context
    return DataLoader(dataset, batch_size=args.batch_size, shuffle=shuffle)


dataloader, held_out = load(range(40), shuffle=True), load(range(40, 48), shuffle=False)
steps = args.epochs * len(dataloader)

# --- model, adapter, optimizer ----------------------------------------------------------------------------------------

ATTENTION, EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"], ["w1", "w2", "w3"]
# Each process reads only its own cut of the weights.
model = MegatronModel(model_id=args.model, mixed_precision=args.precision, remote_group="model")
targets = ATTENTION + EXPERTS if args.experts else ATTENTION
model.add_adapter_to_model("identity", peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules=targets))
model.set_optimizer("default", lr=args.learning_rate, weight_decay=0.0)  # Megatron's Adam
model.set_lr_scheduler("default", lr_warmup_steps=steps // 10, lr_decay_steps=steps)
configs = model.get_train_configs()


def evaluate() -> str:
    """Return the mean loss of the conversations that are not trained on."""
    for batch in held_out:
        model.forward_only(inputs=batch)
    return str(model.calculate_metric(is_training=False)["loss"])


before = evaluate()
if is_master():  # under torchrun only in one process
    print(twinkle.get_device_placement())
    print(configs)

# --- the loop ---------------------------------------------------------------------------------------------------------

losses = []
progress = tqdm(total=steps, desc="Megatron", unit="step", disable=not is_master())
for _ in range(args.epochs):
    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step(max_grad_norm=1.0)  # clips, steps, and advances the learning rate
        metrics = model.calculate_metric(is_training=True)  # of the whole batch, in every mode
        losses.append(float(metrics["loss"]))
        progress.set_postfix(loss=metrics["loss"], lr=metrics["learning rate"])
        progress.update()
progress.close()

after = evaluate()
saved = model.save("megatron_tp_moe", output_dir=args.output, merge_lora=True)  # a folder that Transformers loads
if is_master():
    print(f"held-out loss: {before} before, {after} after; the model is in {saved}")
    if args.curve:
        args.curve.write_text(json.dumps({"train": losses, "held_out": [float(before), float(after)]}))
