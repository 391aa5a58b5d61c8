"""Who is asking, what belongs to whom, and which service answers: everything between HTTP and the services.

May import: services and the rooms below them.
"""
