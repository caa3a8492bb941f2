"""The renderers of a swimlane, under one name: ``swimlane.text``, ``swimlane.svg``, ``swimlane.html``, ..."""

from polylane.observe.swimlane.gallery import gallery
from polylane.observe.swimlane.html import html
from polylane.observe.swimlane.perfetto import perfetto
from polylane.observe.swimlane.svg import svg
from polylane.observe.swimlane.text import ansi, text

__all__ = ["ansi", "gallery", "html", "perfetto", "svg", "text"]
