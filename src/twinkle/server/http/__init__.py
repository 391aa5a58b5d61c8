"""What all protocols need of HTTP: reading bodies, limits on connections, streaming answers, relaying requests.

May import: gateway and the rooms below it.
"""
