"""Draw the pictures that the scripts for vision models learn from: a shape in one of four colours, on a grey ground.

    python cookbook/data/draw_pictures.py [--output build/pictures.png]     # a sheet to look at

Size, place and ground are random. The scripts import `drawn_rows` and draw the same rows for the same seed. A row has
the columns of ms://AI-ModelScope/LaTeX_OCR: `image`, and `text`, what the picture shows.
"""

import argparse
import itertools
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 80, 220), "yellow": (240, 210, 40)}
SHAPES = ("circle", "square", "triangle")


def drawn_rows(count: int, seed: int = 0, side: int = 128) -> list[dict]:
    """Draw pictures of side × side pixels. The colours take turns, so that each is equally frequent everywhere."""
    generator, colours = random.Random(seed), itertools.cycle(COLOURS)
    return [{"image": draw(colour, generator, side), "text": colour} for colour in itertools.islice(colours, count)]


def draw(colour: str, generator: random.Random, side: int) -> Image.Image:
    ground = generator.randrange(150, 250)
    image = Image.new("RGB", (side, side), (ground, ground, ground))
    radius = generator.randrange(side // 6, side // 3)
    x, y = (generator.randrange(radius, side - radius) for _ in range(2))
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    pen, shape = ImageDraw.Draw(image), generator.choice(SHAPES)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
    else:
        pen.polygon([(x, top), (left, bottom), (right, bottom)], fill=COLOURS[colour])
    return image


def sheet(rows: list[dict], columns: int) -> Image.Image:
    """Return the pictures side by side, with their texts below them."""
    side, line, gap = rows[0]["image"].width, 16, 8
    lines = -(-len(rows) // columns)
    image = Image.new("RGB", (columns * (side + gap) - gap, lines * (side + line + gap) - gap), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    for number, row in enumerate(rows):
        x, y = number % columns * (side + gap), number // columns * (side + line + gap)
        image.paste(row["image"], (x, y))
        pen.text((x, y + side + 2), row["text"], fill=(0, 0, 0))
    return image


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=12, help="pictures on the sheet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("build/pictures.png"))
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count: got {args.count}, allowed: 1 or more")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    sheet(drawn_rows(args.count, args.seed), columns=6).save(args.output)
    print("wrote", args.output)
