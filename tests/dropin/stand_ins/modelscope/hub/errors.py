"""Errors of the stand-in for ModelScope's hub."""


class HubError(Exception):
    pass


class NotExistError(HubError):
    pass
