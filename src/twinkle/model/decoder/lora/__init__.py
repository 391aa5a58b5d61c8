"""LoRA inside the decoder's linear layers, computed for all adapters of a batch together, also of different ranks."""
