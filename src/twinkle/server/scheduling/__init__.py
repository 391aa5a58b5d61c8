"""Decides which op or sample runs next. Plain Python without I/O.

May import: the shared types.
"""
