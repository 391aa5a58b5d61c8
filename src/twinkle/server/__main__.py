"""``python -m twinkle.server`` is ``twinkle-server``."""

from twinkle.server.cli import main

if __name__ == "__main__":
    main()
