"""Stand-in for python-dotenv: the tests set all variables themselves."""


def load_dotenv(path: str | None = None) -> bool:
    return False
