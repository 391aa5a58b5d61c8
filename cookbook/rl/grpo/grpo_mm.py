"""Reinforcement learning on pictures: GRPO with a reward for the right answer only.

    python cookbook/rl/grpo/grpo_mm.py [--steps 40] [--seed 0]     # in one process

The model sees a picture and is asked for its colour: r, g, b or y. It answers several times, and training makes right
answers likelier. The default model has random weights and would never say one of the four letters, so a short warm-up
teaches it to: there the letters are drawn at random and have nothing to do with the pictures. Then a quarter of the
answers is right, by chance, and only the reward can tell the model which. Trainer and sampler share one copy of the
model.

Other rows with the columns `image`, `problem` and `solution`, like those of CLEVR, come from a hub, without a warm-up:
`--data ms://AI-ModelScope/clevr_cogen_a_train --warm-up 0 --max-tokens 512 --learning-rate 1e-5`, with
TWINKLE_MODEL=hf://Qwen/Qwen3-VL-4B-Instruct.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import peft
from tqdm import tqdm

import twinkle
from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import SamplingParams, Trajectory, user_data_get
from twinkle.dataset import DatasetMeta, LazyDataset
from twinkle.model import MultiLoraTransformersModel
from twinkle.preprocessor import CLEVRProcessor
from twinkle.reward import MultiModalAccuracyReward
from twinkle.sampler import LocalSampler

sys.path.append(str(Path(__file__).parents[2] / "data"))
from draw_pictures import COLOURS, drawn_rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "random://qwen3-vl-tiny"))
parser.add_argument("--data", default="drawn", help="drawn, or rows with image, problem, solution: hf://…, ms://…")
parser.add_argument("--rows", type=int, default=256, help="pictures to train on")
parser.add_argument("--test", type=int, default=64, help="held-out pictures, asked before and after, greedily")
parser.add_argument("--warm-up", type=int, default=50, help="supervised steps on random letters")
parser.add_argument("--steps", type=int, default=40, help="steps of GRPO")
parser.add_argument("--prompts", type=int, default=16, help="pictures per step")
parser.add_argument("--samples", type=int, default=16, help="answers per picture: a group, compared with each other")
parser.add_argument("--max-tokens", type=int, default=1, help="of an answer; a letter is one token")
# Below 1, because the tiny model's frozen head is too flat to ever be sure of a token.
parser.add_argument("--temperature", type=float, default=0.3, help="of the policy, in sampling and in training")
parser.add_argument("--learning-rate", type=float, default=3e-3)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--seed", type=int, default=0, help="seed of the pictures, the adapter and the samples")
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
parser.add_argument("--curve", type=Path, help="write the mean reward of each step here, as JSON")
args = parser.parse_args()
least_of = {"rows": 1, "test": 1, "warm_up": 0, "steps": 0, "prompts": 1, "samples": 2, "max_tokens": 1}
for name, least in least_of.items():
    if (value := vars(args)[name]) < least:
        parser.error(f"--{name.replace('_', '-')}: got {value}, allowed: {least} or more")
if not args.temperature > 0:
    parser.error(f"--temperature: got {args.temperature}, allowed: above 0, or all answers to a picture would be equal")
if args.data != "drawn" and args.warm_up:
    parser.error(f"--warm-up: got {args.warm_up}, allowed: 0 with --data {args.data}, which has no letters to choose")

ADAPTER = "eyes"
twinkle.initialize(seed=args.seed)

# --- the task: pictures with a question, and the right answer for the reward ------------------------------------------

count = args.rows + args.test
if args.data == "drawn":
    rows = drawn_rows(count, args.seed)
    columns = [{"image": row["image"], "problem": "Colour?", "solution": row["text"][0]} for row in rows]
    dataset = LazyDataset(DatasetMeta(data=columns))
    processor = CLEVRProcessor(system="")
else:
    dataset = LazyDataset(DatasetMeta(args.data, data_slice=range(count)))
    processor = CLEVRProcessor()  # asks for the answer between <answer> and </answer>
dataset.map(processor, remove_columns=["image", "problem", "solution"])
trajectories = [dataset[i] for i in range(len(dataset))]  # not encoded: the sampler does that
train, test = trajectories[: args.rows], trajectories[args.rows :]
reward, advantage = MultiModalAccuracyReward(), GRPOAdvantage()

# --- model, adapter, sampler ------------------------------------------------------------------------------------------

model = MultiLoraTransformersModel(model_id=args.model, mixed_precision=args.precision)
model.add_adapter_to_model(ADAPTER, peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
model.set_template("Qwen3_5Template", model_id=args.model, adapter_name=ADAPTER)
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0, adapter_name=ADAPTER)
sampler = LocalSampler(model)
sampler.set_template("Qwen3_5Template", model_id=args.model)


def sample(prompts: list[Trajectory], **options: float) -> list:
    """Sample from the current policy: the sampler uses the model's own adapter."""
    params = SamplingParams(max_tokens=args.max_tokens, logprobs=1, **options)
    responses = sampler.sample(prompts, params, adapter_name=ADAPTER)
    return [sequence for response in responses for sequence in response.sequences]


def accuracy(title: str) -> float:
    answers = [sequence.new_input_feature for sequence in sample(test, temperature=0.0)]
    share = float(np.mean(reward(answers)))
    print(f"{title}: {share:.0%} of {len(test)} answers are right")
    for trajectory, answer in list(zip(test, answers, strict=True))[:4]:
        truth = user_data_get(trajectory["user_data"], "ground_truth")
        print(f"  a picture of {truth!r}: {answer['messages'][-1]['content']!r}")
    return share


# --- the warm-up: the form of an answer, and nothing about the pictures -----------------------------------------------

generator, letters = random.Random(args.seed), [colour[0] for colour in COLOURS]
for _ in range(args.warm_up):
    asked = generator.choices(train, k=args.prompts)
    drawn = (letters * args.prompts)[: args.prompts]  # all letters equally often, or the policy begins with a favourite
    generator.shuffle(drawn)
    answers = [{"role": "assistant", "content": letter} for letter in drawn]
    chats = [{"messages": [*each["messages"], answer]} for each, answer in zip(asked, answers, strict=True)]
    model.forward_backward(inputs=chats, temperature=args.temperature, adapter_name=ADAPTER)
    model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=ADAPTER)
before = accuracy("before")

# --- the loop ---------------------------------------------------------------------------------------------------------

model.set_loss("GRPOLoss", epsilon=0.2, adapter_name=ADAPTER)
curve, progress = [], tqdm(range(args.steps), desc="GRPO with pictures", unit="step")
for step in progress:
    # Sample: every picture of this step is described several times. Picture i has seed + i, so no seed occurs twice.
    turn = range(step * args.prompts, (step + 1) * args.prompts)
    prompts = [train[i % len(train)] for i in turn]
    seed = args.seed * 10**6 + turn.start
    sequences = sample(prompts, num_samples=args.samples, temperature=args.temperature, seed=seed)

    # Judge: the reward of each answer, and how much better it is than its group.
    rewards = reward([sequence.new_input_feature for sequence in sequences])
    advantages = advantage(rewards, num_generations=args.samples).tolist()
    curve.append(float(np.mean(rewards)))

    # Learn: one update. Groups that are all right or all wrong have advantage 0 and teach nothing; leave them out.
    useful = [(sequence, value) for sequence, value in zip(sequences, advantages, strict=True) if value != 0]
    if useful:
        model.forward_backward(
            inputs=[sequence.new_input_feature for sequence, _ in useful],
            old_logps=[[pairs[0][1] for pairs in sequence.logprobs] for sequence, _ in useful],
            advantages=[value for _, value in useful],
            temperature=args.temperature,
            adapter_name=ADAPTER,
        )
        model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=ADAPTER)
    progress.set_postfix(reward=f"{np.mean(curve[-5:]):.2f}", learnt_from=len(useful))

after = accuracy("after")
if args.curve:
    args.curve.write_text(json.dumps({"reward": curve, "accuracy": [before, after]}))
