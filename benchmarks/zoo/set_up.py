"""Lets the environment that runs this see the packages of another one: ``.venv-zoo/bin/python set_up.py .venv``."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def see_packages_of(environment: Path) -> None:
    """Put the packages of a virtual environment after this one's own, links to source folders included."""
    theirs = sysconfig.get_path("purelib", vars={"base": str(environment.resolve())})
    Path(sysconfig.get_path("purelib"), "beside.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")


if __name__ == "__main__":
    see_packages_of(Path(sys.argv[1]))
