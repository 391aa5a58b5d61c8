"""Anthropic's Messages protocol: chats with the same models, runs and checkpoints as in OpenAI's protocol.

May import: http, gateway and the rooms below, and ``protocols.openai``, which generates the answers.
"""
