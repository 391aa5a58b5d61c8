"""Limits on what one tenant and the whole process may use: rates, pools of threads, memory.

May import: scheduling, config, usage, the shared types, and the model's module for host memory.
"""
