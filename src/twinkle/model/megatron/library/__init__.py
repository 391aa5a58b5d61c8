"""The library's models on Megatron: the verbs of adapters, on a trainer whose base model is cut over processes."""
