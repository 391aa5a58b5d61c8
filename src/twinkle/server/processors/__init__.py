"""Datasets, loaders, templates, preprocessors and rewards that live on the server: a worker process for each session.

The server passes request bodies on without reading them; the worker parses them, with modules that the server does not
import. A worker's own imports stay light: the module of a class is imported when a client first asks for the class.
"""
