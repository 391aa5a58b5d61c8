"""LoRA adapters as tensors: their weights and optimizer state, where they lie, and how they are stored in files."""
