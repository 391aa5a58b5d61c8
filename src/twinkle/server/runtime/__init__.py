"""How a server is put together and run: in one process (``embedded``), or on Ray (``ray``).

May import: everything but cli.
"""
