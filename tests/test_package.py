"""The package as users get it: a wheel and a source archive, each trained from outside the repository.

The environment has what polylane depends on, and polylane from the archive alone. `make package` builds the two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import metadata
from pathlib import Path

import pytest

import polylane
from tests.docs.page_blocks import ROOT

RECIPE = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def data(split):
    return [(torch.randn(4, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(32)]
"""


def run(folder: Path, *command: object) -> str:
    """What a command prints; the repository is on no path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive of a copy of the repository's tracked files."""
    folder = tmp_path_factory.mktemp("archives")
    # What is built leaves traces in its folder.
    names = ["src", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"]
    (folder / "copy").mkdir()
    run(ROOT, "cp", "-r", *names, folder / "copy")
    run(folder / "copy", "rm", "-rf", "src/polylane.egg-info")
    run(folder / "copy", sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    return folder


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_archive_is_installed_and_trained_from(kind: str, archives: Path, tmp_path: Path) -> None:
    (archive,) = archives.glob(kind)
    venv.create(tmp_path / "environment", symlinks=True)
    python = tmp_path / "environment/bin/python"
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    # A path that a .pth file adds is no site folder: of it packages are found, and no editable installation.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q", "--no-deps")
    run(tmp_path, *pip, "--no-build-isolation", "--force-reinstall", archive)
    command = tmp_path / "environment/bin/polylane"
    (tmp_path / "mymodel.py").write_text(RECIPE)
    run(tmp_path, command, "train", "mymodel.py", "--workers", "2", "--plan", "data=2", "--steps", "2", "--run", "run")
    # The page and the swimlane are made of files that are no modules.
    assert {"report.html", "swimlane.html", "model.safetensors"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert [*packages.glob("polylane/cluster/presets/*.yaml")]


def test_the_version_stands_in_one_place() -> None:
    assert metadata("polylane")["Version"] == polylane.__version__, "make install: it is the version that was installed"
    assert f"\n## {polylane.__version__}" in (ROOT / "CHANGELOG.md").read_text()
