"""LoRA's options over the native protocol, on a server with a tiny real model that is killed in between."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest

from tests.support.servers.native_running import NativeTenant
from tests.support.servers.running import Server, torch_config

MODEL = "llama-tiny"
OPTIONS: Mapping[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": "all-linear",
    "lora_dropout": 0.3,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 12, "1.mlp.up_proj": 2},
    "alpha_pattern": {"q_proj": 3},
    "exclude_modules": ["o_proj"],
    "init_lora_weights": "gaussian",
}


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), torch_config(f"random://{MODEL}"), snapshot=0.05).start()
    yield server
    server.close()


def sent(**fields: Any) -> str:
    config = peft.LoraConfig(**{**OPTIONS, **fields}).to_dict()
    return json.dumps({**config, "_TWINKLE_TYPE_": "LoraConfig"}, default=list)


def add(tenant: NativeTenant, name: str = "a", **fields: Any) -> None:
    tenant.verb("add_adapter_to_model", adapter_name=name, config=sent(**fields), seed=5)
    tenant.verb("set_optimizer", adapter_name=name, optimizer_cls="AdamW", lr=0.05)


def rows(seed: int) -> list[dict[str, list[int]]]:
    tokens = [[(seed * 31 + i * 7 + j * 13) % 250 for j in range(12)] for i in range(2)]
    return [{"input_ids": row, "labels": [*row[1:], -100]} for row in tokens]


def train(tenant: NativeTenant, interrupt: Mapping[float, Any]) -> list[object]:
    """Take four steps of all kinds; ``interrupt`` has actions to run before some of them, and before a backward."""
    results: list[object] = []
    for number in range(4):
        interrupt.get(number, lambda: None)()
        if number == 2:
            results.append(tenant.verb("forward", adapter_name="a", inputs=rows(number))["logps"])
            interrupt.get(2.5, lambda: None)()
            results.append(tenant.verb("calculate_loss", adapter_name="a"))
            tenant.verb("backward", adapter_name="a")
        else:
            results.append(tenant.verb("forward_backward", adapter_name="a", inputs=rows(number))["loss"])
        tenant.verb("clip_grad_and_step", adapter_name="a")
    return [*results, tenant.verb("get_state_dict", adapter_name="a")]


def test_a_killed_server_drops_the_same_elements_again(fragile: Server) -> None:
    """The same adapter on the same server, with and without kills; results are equal to the last bit."""
    quiet = NativeTenant(fragile.url, "tml-quiet", MODEL)
    add(quiet)
    expected = train(quiet, {})
    without = NativeTenant(fragile.url, "tml-without", MODEL)
    add(without, lora_dropout=0.0)
    assert train(without, {})[1] != expected[1], "dropout has an effect"

    tenant = NativeTenant(fragile.url, "tml-crash", MODEL)
    add(tenant)

    def crash() -> None:
        fragile.kill()
        fragile.start()

    assert train(tenant, {1: crash, 2.5: crash}) == expected
    # An evaluation drops nothing: it is the same twice, and does not disturb training.
    evaluated = [tenant.verb("forward_only", adapter_name="a", inputs=rows(9))["logps"] for _ in range(2)]
    assert evaluated[0] == evaluated[1]


def test_what_was_computed_is_shown_saved_and_resumed(fragile: Server) -> None:
    tenant = NativeTenant(fragile.url, "tml-options", MODEL)
    add(tenant)
    shapes = {name: (len(rows), len(rows[0])) for name, rows in tenant.verb("get_state_dict", adapter_name="a").items()}
    assert {shape[0] for name, shape in shapes.items() if "q_proj.lora_A" in name} == {12}
    assert {shape[0] for name, shape in shapes.items() if "1.mlp.up_proj.lora_A" in name} == {2}
    assert {shape[0] for name, shape in shapes.items() if "0.mlp.up_proj.lora_A" in name} == {4}
    assert not [name for name in shapes if "o_proj" in name]
    described = tenant.verb("get_train_configs", adapter_name="a")
    for line in ("lora_dropout: 0.3", "use_rslora: True", "exclude_modules: ['o_proj']", "'q_proj': 12"):
        assert line in str(described)
    train(tenant, {})
    path = tenant.verb("save", adapter_name="a", name="kept", save_optimizer=True)["twinkle_path"]
    written = [
        json.loads(file.read_text()) for file in Path(fragile.data_dir).rglob("checkpoints/**/adapter_config.json")
    ]
    assert len(written) == 1
    for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "exclude_modules"):
        assert written[0][name] == OPTIONS[name]
    expected = tenant.verb("forward_only", adapter_name="a", inputs=rows(9))["logps"]
    add(tenant, "b")
    tenant.verb("resume_from_checkpoint", adapter_name="b", name=path)
    assert tenant.verb("forward_only", adapter_name="b", inputs=rows(9))["logps"] == expected
    add(tenant, "c", alpha_pattern={})
    refusal = tenant.refusal("resume_from_checkpoint", adapter_name="c", name=path)
    assert "for model.layers.0.self_attn.q_proj" in refusal


def test_what_cannot_be_computed_is_refused_by_name(fragile: Server) -> None:
    tenant = NativeTenant(fragile.url, "tml-refused", MODEL)
    shared = "would change weights of the base model, which all adapters share"

    def refusal(**fields: Any) -> str:
        config = json.dumps({**json.loads(sent()), **fields})
        return tenant.refusal("add_adapter_to_model", adapter_name="x", config=config)

    assert f"modules_to_save=['lm_head'] ({shared})" in refusal(modules_to_save=["lm_head"])
    assert f"init_lora_weights='pissa' ({shared})" in refusal(init_lora_weights="pissa")
    assert "use_dora=True" in refusal(use_dora=True)
    assert "rank_pattern['q_proj']: got 100000" in refusal(rank_pattern={"q_proj": 100_000})
    assert "rank_pattern: got '(a+)+b'" in refusal(rank_pattern={"(a+)+b": 4})
    assert "exclude_modules: got '(a*)*b'" in refusal(exclude_modules="(a*)*b")
    assert "rank_pattern: got '.*.*.*x'" in refusal(rank_pattern={".*.*.*x": 4})
    assert "alpha_pattern: got '6 repeats'" in refusal(alpha_pattern={f"{each}.*.*": 4 for each in "abc"})
    assert "alpha_pattern: got '300 patterns'" in refusal(alpha_pattern={f"m{number}": 1 for number in range(300)})
    assert "lora_dropout: got 1.5" in refusal(lora_dropout=1.5)
    assert "rank_pattern: got [1]" in refusal(rank_pattern=[1])
    assert "exclude_modules: got '.*', allowed: names that leave some module" in refusal(exclude_modules=".*")
    assert "layers_to_transform: got (0,)" in refusal(layers_to_transform=[0])
    add(tenant, "x")  # its name was not used up
