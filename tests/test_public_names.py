"""What `polylane` exports: no module bears a public name, for importing it would put the module in the name's place."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import polylane


@pytest.mark.parametrize("name", [name for name in polylane.__all__ if not name.startswith("__")])
def test_no_module_has_a_public_name(name: str) -> None:
    assert importlib.util.find_spec(f"polylane.{name}") is None


def test_parallelize_is_the_function_whatever_was_imported_first() -> None:
    code = (
        "import polylane.auto.parallelize, polylane.cli, polylane; "
        "assert polylane.parallelize.__name__ == 'parallelize'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
