"""A dataset in the form of GSM8K, and a tokenizer that makes some answers correct, because a random model has none."""

import json
from pathlib import Path
from typing import Any

ANSWER = 7


def write_word_problems(folder: Path, count: int = 12) -> Path:
    folder.mkdir()
    rows = [
        {"question": f"{n} birds are joined by {n}. How many?", "answer": f"…\n#### {ANSWER}"} for n in range(count)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n"
    (folder / "README.md").write_text(f"---\n{configs}---\n")
    return folder


def often_right(tokenizer: Any) -> Any:
    """Return the tokenizer, changed so that every text whose first token is even decodes to the correct answer."""
    tokenizer.decode = lambda tokens, **_: rf"So \boxed{{{ANSWER}}}" if tokens[0] % 2 == 0 else "I wonder."
    return tokenizer
