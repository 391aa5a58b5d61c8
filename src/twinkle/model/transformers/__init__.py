"""TransformersModel: the library's verbs for one model of Transformers, whole or with PEFT adapters."""
