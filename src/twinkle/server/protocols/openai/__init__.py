"""OpenAI's chat and text completions on the same models, runs and checkpoints that Tinker's protocol serves."""
