"""TransformersModel: the library's verbs for one Hugging Face model, trained in full or with PEFT adapters."""
