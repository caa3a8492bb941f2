"""Packages of the zoo: what has to be so before they can be imported beside this build of torch."""

from __future__ import annotations

import sys

import torch


def load_torchvision() -> None:
    """Let torchvision be imported where its compiled operators do not load beside this build of torch.

    Its import describes some of them, which must be there for that; no model here calls one. Other packages import
    torchvision where it is installed, so that this comes before any of them.
    """
    try:
        import torchvision
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

        torchvision._defined_here = library  # what it defines goes with it
