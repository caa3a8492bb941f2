"""Stand-ins for packages that scripts import: tiny data sets of random numbers, made in place, from a fixed seed.

They are put into ``sys.modules``, whether the real packages are installed or not: what is measured is the script's own
loop, and data sets cannot be fetched.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zlib
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.scripts import networks, text

SAMPLES, PIXELS = 16, 32  # of data sets whose script does not say


def seeded(name: str) -> torch.Generator:
    """Return a generator that depends on a name alone."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


# ---- pictures and what is done with them -----------------------------------------------------------------------------


class Picture:
    """What ``PIL.Image.open`` returns: channels between 0 and 1.

    Args:
        channels: (channels, height, width).
    """

    def __init__(self, channels: Tensor) -> None:
        self.channels = channels

    @property
    def size(self) -> tuple[int, int]:
        return self.channels.shape[2], self.channels.shape[1]

    def convert(self, mode: str) -> Picture:
        return self

    def copy(self) -> Picture:
        return Picture(self.channels.clone())

    def split(self) -> tuple[Picture, ...]:
        return tuple(Picture(channel[None]) for channel in self.channels)

    @staticmethod
    def open(name: str) -> Picture:
        return Picture(torch.rand(3, PIXELS, PIXELS, generator=seeded(Path(name).name)))


def compose(transforms: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def transform(value: Any) -> Any:
        for function in transforms:
            value = function(value)
        return value

    return transform


def resize(size: Any) -> Callable[[Picture], Picture]:
    shape = tuple(size) if isinstance(size, Sequence) else (size, size)
    return lambda picture: Picture(F.interpolate(picture.channels[None], shape)[0])


def normalize(mean: Sequence[float], std: Sequence[float]) -> Callable[[Tensor], Tensor]:
    def transform(values: Tensor) -> Tensor:
        shifts, scales = (values.new_tensor(numbers)[:, None, None] for numbers in (mean, std))
        return (values - shifts) / scales

    return transform


def resize_at_random(size: Any, scale: Any = None) -> Callable[[Picture], Picture]:
    def transform(picture: Picture) -> Picture:
        top, left = (torch.rand(2) * PIXELS / 2).long().tolist()
        return resize(min(size, PIXELS) if isinstance(size, int) else (PIXELS, PIXELS))(
            Picture(picture.channels[:, top : top + PIXELS // 2, left : left + PIXELS // 2])
        )

    return transform


def flip_at_random() -> Callable[[Picture], Picture]:
    return lambda picture: Picture(picture.channels.flip(2)) if torch.rand(()) < 0.5 else picture


class Pictures(Dataset[Any]):
    """A data set of pictures and their classes."""

    def __init__(self, count: int, shape: Sequence[int], classes: int, transform: Any, name: str) -> None:
        random = seeded(name)
        self.pictures = torch.rand(count, *shape, generator=random)
        self.targets = torch.arange(count) % classes
        self.data = (255 * self.pictures[:, 0]).byte()
        self.transform = transform or (lambda picture: picture)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Picture(self.pictures[index])), int(self.targets[index])


def mnist(root: str, train: bool = True, download: bool = False, transform: Any = None) -> Pictures:
    return Pictures(40 if train else 20, (1, 28, 28), 10, transform, f"MNIST {train}")


def pictures_of_folder(root: str, transform: Any = None) -> Pictures:
    return Pictures(SAMPLES, (3, PIXELS, PIXELS), 4, transform, root)


def pictures_made_up(size: int = SAMPLES, image_size: Any = (), classes: int = 10, transform: Any = None) -> Pictures:
    shape = [3, *(min(pixels, 64) for pixels in image_size[1:])]
    return Pictures(min(size, SAMPLES), shape, classes, transform, f"made up {size}")


def save_image(tensor: Tensor, name: str, **options: Any) -> None:
    torch.save(tensor, name)


# ---- packages --------------------------------------------------------------------------------------------------------


def module(name: str, **members: Any) -> ModuleType:
    """Return a module that is imported by this name from now on, with these members."""
    made = ModuleType(name)
    made.__dict__.update(members, __path__=[], __spec__=ModuleSpec(name, None))
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
    return made


class Anything(ModuleType):
    """A module all of whose functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def graph_archive(url: str, stream: bool = False) -> Any:
    """Stand-in for ``requests.get``: a citation graph in the format of Cora, as a compressed archive."""
    random = seeded("Cora")
    nodes, words, classes = 1640, 12, 7
    features = torch.rand(nodes, words, generator=random) < 0.3
    content = "\n".join(
        "\t".join([str(node), *(str(int(bit)) for bit in row), f"class{node % classes}"])
        for node, row in enumerate(features.tolist())
    )
    edges = torch.randint(nodes, (3 * nodes, 2), generator=random).unique(dim=0).tolist()
    cites = "\n".join(f"{source}\t{target}" for source, target in edges)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, lines in (("cora.content", content), ("cora.cites", cites)):
            entry = tarfile.TarInfo(f"cora/{name}")
            entry.size = len(lines.encode())
            tar.addfile(entry, io.BytesIO(lines.encode()))
    archive.seek(0)
    return _Opened(SimpleNamespace(raw=archive))


def graph(folder: Path) -> None:
    """Write the citation graph where the scripts look for it: of several workers the last would find it unpacked."""
    with tarfile.open(fileobj=graph_archive("").value.raw, mode="r:gz") as archive:
        archive.extractall(folder, filter="data")


class _Opened:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, *error: object) -> None:
        pass


def install() -> None:
    """Put all stand-ins into ``sys.modules``."""
    module("torchvision")
    module("torchvision.datasets", MNIST=mnist, ImageFolder=pictures_of_folder, FakeData=pictures_made_up, CIFAR10=None)
    module(
        "torchvision.transforms",
        Compose=compose,
        ToTensor=lambda: lambda picture: picture.channels,
        Normalize=normalize,
        Resize=resize,
        CenterCrop=resize,
        RandomResizedCrop=resize_at_random,
        RandomHorizontalFlip=flip_at_random,
        Lambda=lambda function: function,
    )
    module("torchvision.utils", save_image=save_image)
    module(
        "torchvision.models",
        resnet18=networks.ResNet,
        vgg16=networks.vgg16,
        VGG16_Weights=SimpleNamespace(IMAGENET1K_V1=None),
    )
    module("PIL")
    module("PIL.Image", open=Picture.open, ANTIALIAS=None)
    module("timm", create_model=networks.create_model)
    module("requests", get=graph_archive)
    module("six")
    module("six.moves", urllib=None)
    for name in ("matplotlib", "matplotlib.pyplot"):
        sys.modules[name] = Anything(name)
    sys.modules["matplotlib"].pyplot = sys.modules["matplotlib.pyplot"]  # type: ignore[attr-defined]
    text.install(module)


def pictures_in_folders(folder: Path) -> None:
    """Write (empty) picture files where super_resolution looks for its own."""
    for name, count in (("train", 8), ("test", 4)):
        path = folder / "dataset/BSDS300/images" / name
        path.mkdir(parents=True)
        for number in range(count):
            (path / f"{name}{number}.png").touch()


def pets(folder: Path) -> None:
    """Write (empty) picture files whose names say what they show."""
    (folder / "pets").mkdir()
    for number in range(20):
        (folder / "pets" / f"{'cat dog bird'.split()[number % 3]}_{number}.jpg").touch()  # noqa: SIM905


def images_named(folder: Path) -> None:
    """Make the folder that vae saves its images in."""
    (folder / "results").mkdir(exist_ok=True)
