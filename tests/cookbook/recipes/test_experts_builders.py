"""tinker-cookbook's builders read adapters in Tinker's form on experts and on linear attention.

What they write computes what was trained. One process in the cookbook's environment builds for all families.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.cookbook.recipes.builder_runs import BUILDERS, build, require_cookbook, run_jobs
from tests.support.models.experts_reference import ExpertsReference
from tests.support.models.reference import random_datum, seen, with_random_weights
from tests.support.models.seeing_models import processing_of, seeing_datum, seeing_model
from tests.support.models.tiny_models import the_result, tiny_model
from twinkle.model import Datum, LoraSpec, Trainer, TrainItem, adopt_model
from twinkle.model.adapters.expert_exports import convert_folder

pytestmark = pytest.mark.cookbook

SPEC = LoraSpec(4, alpha=6, seed=1, train_unembed=True)
TEXT = ("qwen3_moe", "olmoe", "deepseek_v3", "mixtral", "gpt_oss")
SEEING = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FAMILIES = (*TEXT, *SEEING)
# What the builders refuse, by family, and their reasons.
REFUSED = {
    ("build_hf_model", "mixtral"): "'model.layers.0.mlp.experts.0.gate_proj.weight' which does not exist",
    ("build_lora_adapter", "deepseek_v3"): "DeepSeek",
}
# PEFT itself joins what build_lora_adapter wrote for each expert. Of the other families it knows no such tensors.
PEFT_JOINS = ("qwen3_moe", "olmoe")
CLOSE = 1e-4


@dataclass(frozen=True)
class Trained:
    """A base model and an adapter on it with random factors, and the logits of the plain formula."""

    model: PreTrainedModel
    folder: Path  # with the model in ``base``, the adapter in ``adapter``, and what each builder wrote
    trainer: Trainer
    datum: Datum
    expected: torch.Tensor

    def logits(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(self.datum.tokens)[None], **seen(self.datum)).logits

    def difference(self, model: Any) -> float:
        """Return the largest difference between the logits of a model and those of the plain formula."""
        return (self.logits(model) - self.expected).abs().max().item()


def trained(family: str, folder: Path) -> Trained:
    model: PreTrainedModel = seeing_model(family) if family in SEEING else tiny_model(family)
    model.save_pretrained(folder / "base")
    processing = processing_of(model) if family in SEEING else None
    trainer = Trainer(adopt_model(loaded(family, folder / "base")), model_id="tiny", processing=processing)
    trainer.create_adapter("a", SPEC)
    trainer.restore("a", with_random_weights(trainer, "a", size=0.2))
    trainer.save("a", folder / "own", optimizer=False)
    (folder / "adapter").mkdir()
    convert_folder(folder / "own", folder / "adapter", "tinker", alternating=family == "gpt_oss")
    datum = seeing_datum(model, [(64, 96)], 3) if family in SEEING else random_datum(model, "cross_entropy", 13, 1)
    plain = ExpertsReference(model, SPEC, trainer.weights("a"))
    expected = plain.logits(torch.from_numpy(datum.tokens)[None], **seen(datum)).detach()
    return Trained(model, folder, trainer, datum, expected)


def loaded(family: str, folder: Path) -> Any:
    loads = AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM
    return loads.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def all_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    require_cookbook()
    directory = tmp_path_factory.mktemp("built")
    return {family: trained(family, directory / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def said(all_trained: Mapping[str, Trained]) -> dict[str, str]:
    """Run both builders on all families; return their errors by builder and family."""
    jobs = {}
    for family, each in all_trained.items():
        for builder in BUILDERS:
            jobs[f"{builder} {family}"] = build(
                builder, each.folder / "base", each.folder / "adapter", each.folder / builder
            )
    return run_jobs(jobs)


def built(builder: str) -> list[str]:
    return [family for family in FAMILIES if (builder, family) not in REFUSED]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("builder", BUILDERS)
def test_what_is_refused(said: Mapping[str, str], builder: str, family: str) -> None:
    assert REFUSED.get((builder, family), "") in said[f"{builder} {family}"]
    assert bool(said[f"{builder} {family}"]) == ((builder, family) in REFUSED), said


@pytest.mark.parametrize("family", built("build_hf_model"))
def test_merged_models_compute_what_was_trained(all_trained: Mapping[str, Trained], said: object, family: str) -> None:
    each = all_trained[family]
    assert each.difference(each.model) > 1e-2
    assert each.difference(loaded(family, each.folder / "build_hf_model")) < CLOSE


@pytest.mark.parametrize("family", built("build_lora_adapter"))
def test_built_adapters_compute_what_was_trained(all_trained: Mapping[str, Trained], said: object, family: str) -> None:
    """We read what the builder wrote, and write it for PEFT. Where PEFT itself reads it as it is, it computes the same.

    For Qwen3.5 the builder leaves query, key and value of linear attention apart, and PEFT passes over what it does not
    know.
    """
    each = all_trained[family]
    source, form = each.folder / "build_lora_adapter", each.folder / "peft"
    each.trainer.create_adapter_from_checkpoint("built", source, optimizer=False)
    ours, theirs = (
        the_result(each.trainer.forward([TrainItem(name, [each.datum])])[0]).logprobs[0] for name in ("built", "a")
    )
    assert abs(ours - theirs).max() < CLOSE
    form.mkdir()
    convert_folder(source, form, "peft", alternating=family == "gpt_oss")
    assert each.difference(peft.PeftModel.from_pretrained(loaded(family, each.folder / "base"), form)) < CLOSE
    if family in PEFT_JOINS:
        assert each.difference(peft.PeftModel.from_pretrained(loaded(family, each.folder / "base"), source)) < CLOSE


def test_peft_passes_over_the_projections_of_linear_attention(all_trained: Mapping[str, Trained], said: object) -> None:
    """PEFT says nothing about what it leaves out. This is why docs/adapters.md names another way for Qwen3.5."""
    each = all_trained["qwen3_5"]
    model = peft.PeftModel.from_pretrained(loaded("qwen3_5", each.folder / "base"), each.folder / "build_lora_adapter")
    assert each.difference(model) > 1e-2
