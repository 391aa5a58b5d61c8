"""Draw measurements as a small SVG: one panel for each curve, with marks for kills and phases."""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.robustness.soak.measuring import Row

WIDTH, PANEL, LEFT, RIGHT, GAP = 760, 64, 150, 70, 18
MOST_POINTS = 380
PANELS = (
    ("rss_mib", "memory of the server, MiB"),
    ("open_files", "open files"),
    ("disk_mib", "data directory, MiB"),
    ("journal_mib", "journal, MiB"),
    ("adapters", "live adapters"),
    ("slots", "device slots in use"),
    ("versions", "sampler versions in memory"),
    ("training_promises", "futures of ops kept"),
    ("sampling_promises", "futures of samples kept"),
    ("children", "processes for data"),
)


def draw(rows: Sequence[Row], marks: Sequence[float], phases: Sequence[tuple[float, str]], file: Path) -> None:
    """Draw to ``file``. ``marks``: seconds at which the server was killed; ``phases``: start and name of each phase."""
    end = rows[-1]["seconds"]
    height = GAP + len(PANELS) * (PANEL + GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    bottom = GAP + len(PANELS) * (PANEL + GAP)
    for second in marks:
        parts.append(_vertical(_x(second, end), GAP, bottom, "#d66", "2 3"))
    for second, name in phases:
        parts.append(_vertical(_x(second, end), GAP - 8, bottom, "#999", ""))
        parts.append(f'<text x="{_x(second, end) + 3:.1f}" y="{GAP - 6}" fill="#777">{escape(name)}</text>')
    for number, (name, title) in enumerate(PANELS):
        parts += _panel(rows, name, title, GAP + number * (PANEL + GAP), end)
    step = max(1, round(end / 60 / 10))
    for minute in range(0, int(end / 60) + 1, step):
        parts.append(f'<text x="{_x(minute * 60, end):.1f}" y="{bottom + 8}" text-anchor="middle">{minute} min</text>')
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(rows: Sequence[Row], name: str, title: str, top: float, end: float) -> list[str]:
    highest = max(max(row[name] for row in rows), 1.0)
    chosen = rows[:: max(1, len(rows) // MOST_POINTS)]
    points = " ".join(
        f"{_x(row['seconds'], end):.1f},{top + PANEL - row[name] / highest * PANEL:.1f}" for row in chosen
    )
    base = top + PANEL
    return [
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#ccc"/>',
        f'<text x="{LEFT - 8}" y="{top + PANEL / 2}" text-anchor="end">{escape(title)}</text>',
        f'<text x="{WIDTH - RIGHT + 6}" y="{top + 8}">{_number(highest)}</text>',
        f'<text x="{WIDTH - RIGHT + 6}" y="{base}" fill="#777">last {_number(rows[-1][name])}</text>',
        f'<polyline points="{points}" fill="none" stroke="#2563a8" stroke-width="1.3"/>',
    ]


def _x(second: float, end: float) -> float:
    return LEFT + second / end * (WIDTH - LEFT - RIGHT)


def _vertical(x: float, top: float, bottom: float, colour: str, dashes: str) -> str:
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}" stroke-dasharray="{dashes}"/>'


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
