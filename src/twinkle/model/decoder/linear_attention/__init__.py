"""Linear attention (Qwen3.5's gated delta net) over packed sequences. Imports torch and decoder/lora, no trainer."""
