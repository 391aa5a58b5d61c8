"""What one tenant may use, and what the whole process may: limits, rates, pools of threads, memory.

May import: scheduling, config and the nouns.
"""
