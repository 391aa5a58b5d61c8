"""Write what the scripts take from a hub: tiny models under the names of the scripts' models, and three datasets.

The datasets have the columns and splits of the real ones. The models are random, but for a few continuations that the
heads of two of them favour: these often answer with ``\\boxed{18}``, the answer of every second word problem here, or
with a tool call, so that rewards differ and rollouts have several turns.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen3_5Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from twinkle import hub

MODEL = "Qwen/Qwen3.5-4B"
TEACHER = "Qwen/Qwen3.5-9B"  # like MODEL, with other weights
EXPERTS = "Qwen/Qwen3-30B-A3B-Instruct-2507"
CALL = '\n{"name": "play", "arguments": {"action_id": 1}}\n'
ANSWER = "\\boxed{18}"
_END = "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_hub(folder: Path) -> Path:
    """Write the hub below ``folder`` and return the model's folder."""
    model = folder / "models" / MODEL
    _write_model(model, seed=0)
    _write_model(folder / "models" / TEACHER, seed=1)
    _write_experts(folder / "models" / EXPERTS)
    _write_rows(folder / "datasets/swift/self-cognition", _self_cognition())
    _write_rows(folder / "datasets/hjh0119/shareAI-Llama3-DPO-zh-en-emoji", _preferences())
    _write_rows(folder / "datasets/modelscope/gsm8k/main", _word_problems())
    _write_rows(folder / "datasets/modelscope/gsm8k/main", _word_problems(), split="test")
    _write_rows(folder / "datasets/modelscope/gsm8k/socratic", _word_problems())
    _write_subsets(folder / "datasets/modelscope/gsm8k")
    return model


def write_multimodal_hub(folder: Path, hub_folder: Path) -> Path:
    """Copy a hub, and describe its model as the multimodal Qwen3.5; return the model's folder.

    twinkle-kit's template for Qwen3.5 accepts no other model. It reads the configuration and the tokenizer only.
    """
    shutil.copytree(hub_folder, folder, dirs_exist_ok=True)
    model = folder / "models" / MODEL
    config = Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"])
    (model / "config.json").write_text(config.to_json_string(use_diff=False))
    return model


def _write_model(folder: Path, seed: int) -> None:
    tokenizer = _tokenizer()
    end = tokenizer.convert_tokens_to_ids(_END)
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM on a CPU needs at least this
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.get_input_embeddings().weight)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in ("<tool_call>", CALL, "</tool_call>", ANSWER)}
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    likely = [
        (newline, ids[ANSWER], 10.0),
        (newline, ids["<tool_call>"], 10.0),
        (ids[ANSWER], end, 14.0),
        (ids["<tool_call>"], ids[CALL], 14.0),
        (ids[CALL], ids["</tool_call>"], 14.0),
        (ids["</tool_call>"], end, 14.0),
    ]
    with torch.no_grad():
        embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
        for token, following, logit in likely:  # the last hidden state is nearly the token's embedding
            head[following] += logit * embeddings[token] / embeddings[token].square().sum()
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_experts(folder: Path) -> None:
    """Write a random model with experts, for scripts that do not sample."""
    tokenizer = _tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END),
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of bytes, with a token for each of the continuations that the model favours."""
    tokenizer = AutoTokenizer.from_pretrained(hub.resolve("random://llama-tiny").path)
    tokenizer.add_special_tokens({"eos_token": _END, "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", CALL, ANSWER])
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _self_cognition() -> list[dict[str, Any]]:
    names = ["who are you", "what is your name", "who made you", "introduce yourself", "are you a robot"]
    answers = ["I am {{NAME}}.", "My name is {{NAME}}, made by {{AUTHOR}}.", "{{AUTHOR}} made me.", "Hello, {{NAME}}."]
    return [
        {"query": f"{names[i % 5]}?", "response": answers[i % 4], "tag": "en", "name": "", "author": ""}
        for i in range(20)
    ]


def _preferences() -> list[dict[str, Any]]:
    things = ["bread", "music", "rain", "chess", "birds", "trains", "tea", "snow"]
    return [
        {"prompt": f"Tell me about {thing}.", "answer_zh": f"{thing}! 😀", "answer_en": f"There is {thing} here."}
        for thing in things
    ]


def _word_problems() -> list[dict[str, Any]]:
    return [
        {"question": f"What is {n} plus {18 - n + n % 2}?", "answer": f"We add them.\n#### {18 + n % 2}"}
        for n in range(2, 14)
    ]


def _write_rows(folder: Path, rows: list[dict[str, Any]], split: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _write_subsets(folder: Path) -> None:
    """Describe subsets and splits as a hub's repository does. All of them have the same rows."""
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n"
        "- config_name: socratic\n  data_files:\n  - split: train\n    path: socratic/train.jsonl\n---\n"
    )
