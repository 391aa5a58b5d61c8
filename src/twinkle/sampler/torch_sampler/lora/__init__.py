"""LoRA of many versions in the passes of the torch sampler."""
