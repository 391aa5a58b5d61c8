"""Limits on what one tenant and the whole process may use: rates, pools of threads, memory.

May import: scheduling, config and the shared types.
"""
