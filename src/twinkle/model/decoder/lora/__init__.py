"""LoRA inside the decoder's linear layers: one product for all adapters of a batch, whatever their ranks."""
