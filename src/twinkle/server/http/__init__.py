"""The HTTP code that all protocols share: reading bodies, limits on connections, streamed answers, relayed requests.

May import: gateway and the rooms below it.
"""
