"""What is trained and how, as a text for people."""

import math
from collections.abc import Mapping

from twinkle.model.library.optimizer_group import OptimizerGroup

_EXAMPLES = 3


def describe(
    group: OptimizerGroup,
    model_id: str,
    adapter_config: Mapping[str, object] | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> str:
    """``shapes``: of the parameters that are trained, by name."""
    lines = [f"model: {model_id}"]
    if adapter_config is not None:
        lines.append(f"adapter: {group.adapter_name}")
        lines += [f"  {name}: {adapter_config[name]}" for name in ("r", "lora_alpha", "target_modules")]
    count = sum(math.prod(shape) for shape in shapes.values())
    lines.append(f"trained: {count:,} parameters in {len(shapes)} tensors, such as")
    lines += [f"  {name} {shape}" for name, shape in list(shapes.items())[:_EXAMPLES]]
    lines.append(f"loss: {type(group.loss_instance).__name__}")
    if group.optimizer is None:
        lines.append("optimizer: none")
    else:
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(group.lr))
        lines.append(f"optimizer: {type(group.optimizer).__name__}, learning rate {rates}")
    scheduler = group.lr_scheduler
    lines.append(f"learning-rate scheduler: {'none' if scheduler is None else type(scheduler).__name__}")
    lines.append(f"gradient accumulation steps: {group.gradient_accumulation_steps}")
    return "\n".join(lines)
