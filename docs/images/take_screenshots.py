"""Takes the pictures of docs/dashboard.md from a server on which something was trained. Needs chromium, as tests do.

python docs/images/take_screenshots.py http://127.0.0.1:8000 tml-local RUN CHECKPOINT

With --picture FILE, only the picture of a conversation about this file is taken, from a server with a vision model.
"""

import argparse
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))
from tests.support.servers.chromium import Page  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url")
parser.add_argument("key")
parser.add_argument("run", help="the run whose curves are shown")
parser.add_argument("checkpoint", help="the checkpoint that is chatted with")
parser.add_argument("--question", default="Who are you?")
parser.add_argument("--picture", type=Path, help="a PNG or JPEG file that the question is about")
args = parser.parse_args()


def picture(page: Page, name: str) -> None:
    """As high as what is on the page, in 64 colours: a few dozen kilobytes."""
    height = page.driver.execute_script("return document.querySelector('main').getBoundingClientRect().bottom + 20")
    shot = Image.open(io.BytesIO(page.driver.get_screenshot_as_png()))
    cut = shot.crop((0, 0, shot.width, min(shot.height, int(height))))
    cut.convert("RGB").quantize(64).save(HERE / f"dashboard_{name}.png", optimize=True)


def views(page: Page) -> None:
    page.until(lambda: any(link.text == args.run and not link.click() for link in page.all("#runs a")))
    page.find(".chart")
    picture(page, "runs")
    page.prefer("dark")
    picture(page, "runs_dark")
    page.prefer("light")
    for view in ("Adapters", "Sessions", "Checkpoints"):
        page.view(view)
        page.find("main table")
        picture(page, view.lower())


def playground(page: Page) -> None:
    page.view("Playground")
    page.until(lambda: any(each.text == args.checkpoint and not each.click() for each in page.all("#model option")))
    page.until(lambda: args.checkpoint in page.text("#tuned h3"))
    for field, value in (("temperature", 0), ("max-tokens", 48)):
        page.script(f"document.getElementById('{field}').value = '{value}'")
    if args.picture is not None:
        page.find("#picture").send_keys(str(args.picture.absolute()))
        page.find("#pictures img")
    page.find("#prompt").send_keys(args.question)
    page.click("#send")
    for column in ("#base", "#tuned"):
        page.find(f"{column} .assistant.done")
    picture(page, "playground" if args.picture is None else "picture")


page = Page(Path(tempfile.mkdtemp()))
page.patience = 600.0  # a small machine that trains meanwhile
try:
    page.open(args.url)
    page.prefer("light")
    page.enter_key(args.key)
    if args.picture is None:
        views(page)
    playground(page)
finally:
    page.close()
