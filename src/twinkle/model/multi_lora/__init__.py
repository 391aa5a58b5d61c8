"""MultiLoraTransformersModel: the library's verbs for many LoRA adapters on one Trainer."""
