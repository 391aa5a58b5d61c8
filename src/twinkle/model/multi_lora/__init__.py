"""MultiLoraTransformersModel: the library's verbs for many LoRA adapters on one Trainer."""

from twinkle.compatibility import find_name


def __getattr__(name: str) -> object:
    return find_name(__name__, name)
