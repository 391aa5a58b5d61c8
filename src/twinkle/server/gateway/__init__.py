"""Everything between HTTP and the services: identify the caller, check ownership, and choose the service.

May import: services and the rooms below them.
"""
