"""The system's Chromium for pages that are tested in a real browser; without network, and skipped where it is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@dataclass
class Opened:
    """A page that is open, and what it has said and asked for.

    Attributes:
        page: of playwright.
        messages: lines on the console, and exceptions that nobody caught.
        requests: addresses that it asked for, its own first.
    """

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Opened]:
    """Context manager: a page in a browser of its own."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("playwright is not installed")
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            seen = Opened(page)
            page.on("console", lambda message: seen.messages.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: seen.messages.append(str(error)))
            page.on("request", lambda request: seen.requests.append(request.url))
            page.goto(url)
            yield seen
        finally:
            browser.close()
