"""Builds the fake CUDA device: a library that torch loads in place of its CUDA part, with host memory as the device's.

Every operator runs the CPU's kernel, and refuses tensors of both devices as CUDA does. Copies that do not block happen
when they are waited for, leave noise in a target on the host until then, and read what earlier ones have brought, as on
one stream. So what passes on it puts every tensor on the
device, and waits for every copy; how fast it is, and what CUDA's own kernels compute, it does not show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def build(folder: Path) -> Path:
    """Compile the device into a folder, which takes half a minute; return the library."""
    import torch
    from torch.utils.cpp_extension import include_paths

    libraries = Path(torch.__file__).parent / "lib"
    target = folder / "fake_cuda.so"
    paths = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    links = [f"-L{libraries}", "-ltorch_cpu", "-lc10", "-ltorch", f"-Wl,-rpath,{libraries}"]
    flags = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w"]
    subprocess.run(["g++", *flags, *paths, str(HERE / "fake_cuda.cpp"), "-o", str(target), *links], check=True)
    return target


def can_build() -> bool:
    """Return whether there are a compiler, and a torch without CUDA of its own."""
    import torch

    return shutil.which("g++") is not None and sys.platform == "linux" and torch.version.cuda is None


def environment(library: Path, devices: int) -> dict[str, str]:
    """Return the environment of a Python that has so many fake devices."""
    path = os.pathsep.join(map(str, (HERE / "site", ROOT / "src", ROOT)))
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "PYTHONPATH": path, "FAKE_CUDA": str(library), "FAKE_CUDA_DEVICES": str(devices)}
