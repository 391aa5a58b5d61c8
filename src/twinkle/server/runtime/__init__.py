"""Put a server together and run it: in one process (``embedded``), or in many processes on Ray (``ray``).

May import: everything but cli.
"""
