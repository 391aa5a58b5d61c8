"""Which op runs next. Plain Python without I/O.

May import: the nouns.
"""
