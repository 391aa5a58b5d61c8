"""Every option of PEFT's LoraConfig has PEFT's meaning: trained, saved, loaded and resumed like plain PEFT."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.plain_training import assert_close, features, logps
from twinkle.errors import CheckpointError, UnsupportedError
from twinkle.model import TransformersModel

NAME = "first"
ROWS = [features(9, seed=1), features(6, seed=2)]  # one row each: then dropout draws the same masks packed and padded
OPTIONS: dict[str, dict[str, Any]] = {
    "dropout, rslora, patterns": {
        "lora_dropout": 0.3,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {r"layers\.0\..*v_proj": 16},
    },
    "exclusions": {
        "target_modules": "all-linear",
        "exclude_modules": ["down_proj"],
        "init_lora_weights": "gaussian",
    },
    "a regular expression": {"target_modules": r".*layers\.1\..*(q|v)_proj", "init_lora_weights": False},
    "trained modules": {"modules_to_save": ["embed_tokens", "lm_head", "norm"]},
    "dora": {"use_dora": True, "init_lora_weights": "orthogonal"},
    "all biases": {"bias": "all", "lora_bias": True, "target_modules": ["q_proj"]},
    "biases of targets, one layer": {"bias": "lora_only", "layers_to_transform": [1], "layers_pattern": "layers"},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa, approximate": {"init_lora_weights": "pissa_niter_2", "target_modules": ["q_proj"]},
    "olora": {"init_lora_weights": "olora"},
    "tokens": {"trainable_token_indices": [5, 7, 11]},
    "embeddings with LoRA": {"target_modules": ["embed_tokens", "q_proj"]},
}


@dataclass(frozen=True)
class Base:
    folder: Path
    plain: torch.nn.Module


def config(options: dict[str, Any]) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **options})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model whose attention has biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    small = Qwen2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(small)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return Base(folder, model)


def ours(base, options=None):
    model = TransformersModel(model_id=base.folder, mixed_precision="fp32", device="cpu")
    if options is not None:
        torch.manual_seed(1)
        model.add_adapter_to_model(NAME, config(options))
        model.set_optimizer("SGD", lr=0.5, weight_decay=0.0)
    return model


def steps(model, rows):
    losses = []
    for batch in rows:
        torch.manual_seed(2)
        losses.append(model.forward_backward(inputs=batch)["loss"])
        model.clip_grad_and_step(max_grad_norm=1e9)
    return losses


def plain_steps(model, optimizer, rows):
    losses = []
    for batch in rows:
        torch.manual_seed(2)
        labels, found, _ = logps(model, batch)
        total = -found[labels != -100].sum()
        (total / (labels != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def trained(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.filterwarnings("ignore")  # of PEFT, about embeddings that are saved and biases that layers lack
@pytest.mark.parametrize("name", OPTIONS)
def test_equal_to_plain_peft(base, tmp_path, name):
    options = OPTIONS[name]
    model = ours(base, options)
    torch.manual_seed(0 if name == "pissa, approximate" else 1)  # the seed of its random decomposition
    plain = peft.get_peft_model(copy.deepcopy(base.plain), config(options), adapter_name=NAME).train()
    before = trained(plain)
    assert_close(trained(model.model), before, tolerance=1e-6)
    optimizer = torch.optim.SGD([each for each in plain.parameters() if each.requires_grad], lr=0.5)
    assert steps(model, ROWS) == pytest.approx(plain_steps(plain, optimizer, ROWS), rel=1e-5)
    after = trained(plain)
    assert_close(trained(model.model), after)
    assert any(not torch.equal(value, before[key]) for key, value in after.items())

    directory = Path(model.save("checkpoint", output_dir=tmp_path, save_optimizer=True))
    saved = json.loads((directory / "adapter_config.json").read_text())
    for field, value in options.items():
        if field != "target_modules":  # PEFT stores names instead of 'all-linear'
            assert sorted(saved[field]) == sorted(value) if isinstance(value, list) else saved[field] == value
    expected = model.forward_only(inputs=ROWS[0])["logps"]
    torch.manual_seed(0)
    with torch.no_grad():
        read = peft.PeftModel.from_pretrained(copy.deepcopy(base.plain), directory).eval()
        torch.testing.assert_close(logps(read, ROWS[0])[1], expected, rtol=1e-4, atol=1e-5)
    if name in ("a regular expression", "embeddings with LoRA", "exclusions", "olora"):
        return  # their files are like those of others, which are resumed below
    resumed = ours(base, options)
    resumed.resume_from_checkpoint(directory)
    assert steps(resumed, ROWS) == pytest.approx(steps(model, ROWS), rel=1e-5)
    assert_close(trained(resumed.model), trained(model.model))


def test_trained_modules_in_a_directory(base, tmp_path):
    model = ours(base, {"modules_to_save": ["lm_head"]})
    steps(model, ROWS)
    directory = model.save("checkpoint", output_dir=tmp_path)
    assert "base_model.model.lm_head.weight" in load_file(Path(directory) / "adapter_model.safetensors")
    assert "base_model.model.lm_head.weight" in model.get_state_dict()
    again = ours(base)
    again.add_adapter_to_model(NAME, directory)
    again.set_optimizer("SGD", lr=0.5, weight_decay=0.0)
    assert steps(again, ROWS) == pytest.approx(steps(model, ROWS), rel=1e-5)
    other = ours(base, {})
    with pytest.raises(CheckpointError, match=r"does not fit adapter 'first'.*lm_head"):
        other.load("checkpoint", output_dir=tmp_path)


def test_weights_that_belong_to_another_base_model_are_refused(base, tmp_path):
    ours(base, {"init_lora_weights": "pissa"}).save("pissa", output_dir=tmp_path)
    with pytest.raises(CheckpointError, match="init_lora_weights: got 'pissa', allowed: True"):
        ours(base, {}).load("pissa", output_dir=tmp_path)


def test_biases_belong_to_one_adapter(base):
    for first, second in (("all", "none"), ("none", "lora_only")):
        model = ours(base, {"bias": first})
        with pytest.raises(UnsupportedError, match=r"bias: got .*, which trains biases of the base model"):
            model.add_adapter_to_model("second", config({"bias": second}))
    frozen = ours(base)
    frozen.add_adapter_to_model(NAME, config({"bias": "all"}), is_trainable=False)
    assert not trained(frozen.model)
