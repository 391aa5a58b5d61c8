"""Time to encode conversations: ``Dataset.encode`` against a plain ``datasets.map`` with the same tokenizer.

The plain script is what one would write by hand for one question and one answer: the chat template renders the prompt
and the whole conversation, the tokenizer's batch call gives the tokens, and everything before the answer gets label
−100. First, a check that both give the same tokens and labels. Then both run in turns, so that other load on the
machine affects both equally.

    python benchmarks/tokenise.py --rows 100000 --json build/bench/tokenise.json
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.template import Template

WORDS = ("the", "model", "trains", "on", "short", "rows", "and", "learns", "what", "to", "say", "when", "asked")
Encode = Callable[[datasets.Dataset, Template, int], datasets.Dataset]


def main() -> None:
    args = parse_arguments()
    datasets.disable_progress_bars()
    template = Template(args.model)
    rows = conversations(args.rows)
    check(rows.take(min(200, args.rows)), template)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(args.repeats):
        for name, encode in VARIANTS.items():
            start = time.perf_counter()
            encode(rows, template, args.num_proc)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = statistics.median(ours / plain for plain, ours in zip(seconds["plain"], seconds["twinkle"], strict=True))
    for name, median in medians.items():
        print(f"{name:>8} {median:8.2f} s {args.rows / median:10.0f} rows/s")
    print(f"twinkle takes {ratio:.2f} of the plain script's time")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "datasets": datasets.__version__,
            "model": args.model,
            "rows": args.rows,
            "num_proc": args.num_proc,
            "seconds": seconds,
            "ratio": ratio,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--model", default="random://llama-tiny")
    parser.add_argument("--num-proc", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


def conversations(count: int) -> datasets.Dataset:
    """Return rows with one short question and one short answer each."""
    generator = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(low, high)))

    return datasets.Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": text(5, 20)}, {"role": "assistant", "content": text(5, 40)}]}
            for _ in range(count)
        ]
    )


def plain(rows: datasets.Dataset, template: Template, num_proc: int) -> datasets.Dataset:
    tokenizer = template.tokenizer

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        chats = batch["messages"]
        prompts = [chat[:-1] for chat in chats]
        prompt_texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        lengths = [len(ids) for ids in tokenizer(prompt_texts, add_special_tokens=False)["input_ids"]]
        encoded = tokenizer(texts, add_special_tokens=False)
        ids = encoded["input_ids"]
        labels = [[-100] * (n - 1) + row[n:] + [-100] for n, row in zip(lengths, ids, strict=True)]
        positions = [list(range(len(row))) for row in ids]
        return {**encoded, "labels": labels, "position_ids": positions, "length": [len(row) for row in ids]}

    return rows.map(encode, batched=True, num_proc=num_proc if num_proc > 1 else None, load_from_cache_file=False)


def twinkle(rows: datasets.Dataset, template: Template, num_proc: int) -> datasets.Dataset:
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template(template)
    if num_proc > 1:
        dataset.encode(num_proc=num_proc)
    else:
        dataset.encode()
    return dataset.dataset


VARIANTS: dict[str, Encode] = {"plain": plain, "twinkle": twinkle}


def check(rows: datasets.Dataset, template: Template) -> None:
    """Raise an AssertionError if the two encodings differ."""
    for ours, theirs in zip(twinkle(rows, template, 1), plain(rows, template, 1), strict=True):
        for name in ("input_ids", "labels", "attention_mask", "position_ids", "length"):
            assert ours[name] == theirs[name], f"{name} differs"


if __name__ == "__main__":
    main()
