"""LoRA adapters as tensors: their weights and optimizer state, where they are in memory, and how they are stored."""
