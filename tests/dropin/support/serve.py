"""Start ``twinkle-server`` with the stand-in for ModelScope on its path: ``python serve.py CONFIG``"""

import sys
from pathlib import Path

from tests.support.servers.tuned_launch import main

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))
    main(["--", "launch", "-c", sys.argv[1]])
