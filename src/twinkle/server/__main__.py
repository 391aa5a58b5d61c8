"""Run the command ``twinkle-server`` as ``python -m twinkle.server``."""

import sys

from twinkle.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
