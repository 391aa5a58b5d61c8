"""Datasets, loaders, templates, preprocessors and rewards that live on the server, in one worker process a session.

The server passes the bodies of these requests on without parsing them; the worker parses them, with modules that the
server does not import. A worker's own imports stay light: the module of a class is imported when a client first asks
for the class.
"""
