"""Random conversations, and small tokenizers to encode them."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

_WORDS = [
    "the",
    "cat",
    "a",
    "sat",
    "Paris",
    "12",
    "3.5",
    "\n",
    "\n\n",
    " ",
    "  ",
    "naïve",
    "北京",
    "🙂",
    "def f(x):",
    "{}",
]
_WORDS += [
    "assistant",
    "user",
    "system",
    "I think",
    "not",
    "and",
    "tool",
    "é",
    "\t",
    "x=1",
    "<b>",
    "&",
    '"quoted"',
    "\\",
]

TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "Finds <it>", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {"type": "object"}}},
]


def save_tokenizer(folder: Path, special: tuple[str, ...], chat_template: str, bos: str | None, eos: str) -> Path:
    """Save a byte-level BPE tokenizer with a few merges, among them line breaks and spaces, as real tokenizers have."""
    tokenizer = Tokenizer(models.BPE())
    # The splits of GPT-2 and later: a run of white space or line breaks is a token that can cross a boundary.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = " ".join(_WORDS * 20) + "\n\n\n" * 30 + "assistant\n\n" * 20
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    if bos:
        config["bos_token"] = bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(chat_template)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def random_text(draw: random.Random, longest: int = 8) -> str:
    return draw.choice(["", " "]).join(draw.choice(_WORDS) for _ in range(draw.randint(0, longest)))


def random_call(draw: random.Random) -> dict:
    arguments = {random_text(draw, 1) or "k": draw.choice([1, "x", None, [1, "é"], {"a": True}, random_text(draw)])}
    written = draw.choice([arguments, json.dumps(arguments), "", {}])
    return {"type": "function", "function": {"name": draw.choice(["find", "add"]), "arguments": written}}


def random_assistant(draw: random.Random, tools: bool) -> dict:
    message = {"role": "assistant", "content": random_text(draw)}
    thought = draw.random()
    if thought < 0.3:
        message["reasoning_content"] = random_text(draw).strip("\n") or "hm"
    elif thought < 0.5:
        message["content"] = f"<think>\n{random_text(draw)}\n</think>\n\n{message['content']}"
    if tools and draw.random() < 0.4:
        message["tool_calls"] = [random_call(draw) for _ in range(draw.randint(1, 2))]
        if draw.random() < 0.3:
            message["content"] = None
    return message


def random_trajectory(draw: random.Random, tools: bool) -> dict:
    """Return random turns in any order that templates accept: tool results, several answers in a row, an open end."""
    messages: list[dict] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": random_text(draw)})
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": random_text(draw)})
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            messages.append(random_assistant(draw, tools))
            if messages[-1].get("tool_calls"):
                messages += [{"role": "tool", "content": random_text(draw)} for _ in range(draw.randint(1, 2))]
    trajectory: dict = {"messages": messages}
    if tools and draw.random() < 0.5:
        trajectory["tools"] = TOOLS[: draw.randint(1, 2)]
    return trajectory
