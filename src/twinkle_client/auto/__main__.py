"""``python -m twinkle_client.auto`` is ``twinkle-auto``."""

import sys

from twinkle_client.auto.cli import main

sys.exit(main())
