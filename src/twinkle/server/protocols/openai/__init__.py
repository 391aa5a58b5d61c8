"""OpenAI's protocol: chat and text completions from the same models, runs and checkpoints as in Tinker's protocol."""
