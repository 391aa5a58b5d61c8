"""Run the Python blocks of a page from top to bottom in one namespace, as a reader would who copies them into a file.

The arguments are the path of the page, and an object in JSON with texts to replace. Fragments are left out.
"""

import json
import sys
from pathlib import Path

from tests.docs.code_blocks import blocks_of


def main(page: Path, replacements: dict[str, str]) -> None:
    sys.argv = ["script.py"]
    names = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language == "python" and block.reason is None:
            text = block.text
            for old, new in replacements.items():
                text = text.replace(old, new)
            # Empty lines before the code give tracebacks the line numbers of the page.
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)
            print(f"ran {block.name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
