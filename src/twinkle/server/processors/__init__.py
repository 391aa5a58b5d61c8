"""Datasets, loaders, templates, preprocessors and rewards that live on the server: a worker process for each session.

The server passes bodies through as they are; a worker reads them, and nothing of it is imported by the server. Its
imports stay light: what a class needs is imported when somebody first asks for one.
"""
