"""Bytes over microbatches as a picture: one line for every schedule, as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 30, 190, 45
# Distinct also for who sees red and green alike (Okabe and Ito, 2008), and by their dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "var(--ink)", "#8B6914", "#7F7F7F")
DASHES = ("", "6 3", "2 2", "8 3 2 3")
TEXT = 'font-family="sans-serif" font-size="12"'
# On a dark page, paper and words are those of swimlanes.
STYLE = """<style>
svg { --ink: #1f2328; } .paper { fill: #ffffff; }
text { fill: var(--ink); } line { stroke: #8c959f; stroke-opacity: 0.35; } polyline { fill: none; stroke-width: 2; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; } .paper { fill: #0d1117; } }
</style>"""


def draw(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Return an SVG picture of MiB over microbatches, whose axis doubles from mark to mark.

    Args:
        title: said above.
        lines: by schedule the points (microbatches, MiB).
    """
    counts = sorted({m for points in lines.values() for m, _ in points})
    top = max(size for points in lines.values() for _, size in points) * 1.05
    first, span = math.log2(counts[0]), max(math.log2(counts[-1]) - math.log2(counts[0]), 1e-9)

    def place(m: float, size: float) -> tuple[float, float]:
        x = LEFT + (math.log2(m) - first) / span * (WIDTH - LEFT - RIGHT)
        return x, TOP + (1 - size / top) * (HEIGHT - TOP - BOTTOM)

    drawn = [f'<text x="{LEFT}" y="18" {TEXT} font-weight="bold">{title}</text>']
    step = 10 ** math.floor(math.log10(top)) / 2
    for i in range(int(top / step) + 1):
        _, y = place(counts[0], i * step)
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" {TEXT} text-anchor="end">{i * step:g}</text>')
    for m in counts:
        x, y = place(m, 0)
        drawn.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" {TEXT} text-anchor="middle">{m}</text>')
    drawn.append(f'<text x="{LEFT}" y="{HEIGHT - 8}" {TEXT}>microbatches of a step; MiB on the worker with most</text>')
    labels = list[tuple[float, str, str]]()
    for number, (name, points) in enumerate(lines.items()):
        color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(m, size) for m, size in points))
        drawn.append(f'<polyline points="{path}" style="stroke: {color}" stroke-dasharray="{dash}"/>')
        labels.append((place(*points[-1])[1], name, color))
    # Labels of lines that end at the same height stand under each other, from the highest line on.
    labels.sort()
    lowest = HEIGHT - BOTTOM - 15 * (len(labels) - 1)
    y = 0.0
    for number, (wanted, name, color) in enumerate(labels):
        y = max(min(wanted, lowest + 15 * number), y + 15)
        drawn.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}" {TEXT} style="fill: {color}">{name}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    background = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, background, *drawn, "</svg>", ""])
