"""The swimlane: one renderer for theory, prediction and measurement, in characters, SVG, HTML and Perfetto's format."""

from polylane.observe.perfetto import perfetto
from polylane.observe.swimlane_html import html
from polylane.observe.swimlane_svg import svg
from polylane.observe.swimlane_text import ansi, text

__all__ = ["ansi", "html", "perfetto", "svg", "text"]
