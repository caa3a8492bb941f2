"""The documentation as a site: built without a warning, from the code where it repeats it, and without the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.generated_pages import PAGES, update
from tests.docs.page_blocks import ROOT


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_is_generated_is_up_to_date(path: Path) -> None:
    page = path.read_text()
    assert page == update(page, PAGES[path]()), "python -m tests.docs.generated_pages writes it"


def test_the_site_is_built_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    """Links and anchors lead somewhere, and no page loads a script, a style, a font or a picture of another host."""
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        line, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    foreign = re.compile(r'(?:\bsrc|<link[^>]*\bhref)="(?:https?:)?//[^"]*"|@import|url\((?:https?:)?//')
    pages = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".css")]
    assert len(pages) > 10
    assert not [(path.name, match[0]) for path in pages for match in foreign.finditer(path.read_text())]


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("examples/*.md")), ids=lambda page: page.name
)
def test_links_of_pages_beside_the_site_lead_somewhere(page: Path) -> None:
    """Those of docs/ are looked at when the site is built."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
