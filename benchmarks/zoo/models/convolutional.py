"""Convolutional networks, of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from benchmarks.zoo.entry import CLASSES, Family, adamw, classify, images, sgd

CONVOLUTIONAL = Family("convolutional", "Convolutional networks")


def from_torchvision(name: str, **how: Any) -> Callable[[], nn.Module]:
    """A classifier of torchvision, with random weights."""

    def model() -> nn.Module:
        from torchvision import models

        made: nn.Module = getattr(models, name)(weights=None, num_classes=CLASSES, **how)
        return made

    return model


def from_timm(name: str, **how: Any) -> Callable[[], nn.Module]:
    """A classifier of timm, with random weights."""

    def model() -> nn.Module:
        import timm

        made: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **how)
        return made

    return model


def thin_resnet(block: str, layers: Sequence[int], **how: Any) -> Callable[[], nn.Module]:
    """torchvision's residual network, of fewer blocks."""

    def model() -> nn.Module:
        from torchvision.models import resnet

        return resnet.ResNet(getattr(resnet, block), list(layers), num_classes=CLASSES, **how)

    return model


def thin_densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 3, 2), 16, num_classes=CLASSES)


def thin_vgg() -> nn.Module:
    from timm.models.vgg import VGG

    made: nn.Module = VGG([8, "M", 16, "M", 32, 32, "M", 16, "M"], CLASSES, mlp_ratio=1 / 64)
    return made


def thin_convmixer() -> nn.Module:
    from timm.models.convmixer import ConvMixer

    made: nn.Module = ConvMixer(32, 6, kernel_size=5, patch_size=4, num_classes=CLASSES)
    return made


THIN = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 64)}  # of timm's residual networks
NF = {"depths": (1, 1, 1, 1), "channels": (32, 32, 64, 64), "stem_chs": 16, "group_size": 8, "num_features": 64}

# Steps and optimizers are those at which a proof once came to a false verdict, or is nearest to one.
for name, package, make, steps, optimizer in (
    ("ResNet", "torchvision", thin_resnet("BasicBlock", (2, 2, 1, 1), width_per_group=64), 2, sgd),
    ("ResNeXt", "torchvision", thin_resnet("Bottleneck", (1, 2, 1, 1), groups=4, width_per_group=8), 1, adamw),
    ("SK-ResNet", "timm", from_timm("skresnet18", **THIN), 3, sgd),
    ("ECA-ResNet", "timm", from_timm("ecaresnet26t", **THIN), 2, adamw),
    ("Res2Net", "timm", from_timm("res2net50_14w_8s", **THIN), 2, sgd),
    ("DenseNet", "torchvision", thin_densenet, 2, adamw),
    ("GoogLeNet", "torchvision", from_torchvision("googlenet", aux_logits=True, init_weights=False), 1, sgd),
    ("VGG", "timm", thin_vgg, 3, sgd),
    ("SqueezeNet", "torchvision", from_torchvision("squeezenet1_1"), 2, adamw),
    ("ShuffleNetV2", "torchvision", from_torchvision("shufflenet_v2_x0_5"), 1, adamw),
    ("MobileNetV2", "torchvision", from_torchvision("mobilenet_v2", width_mult=0.35), 4, sgd),
    ("MobileNetV3", "torchvision", from_torchvision("mobilenet_v3_small"), 3, adamw),
    ("MobileNetV4", "timm", from_timm("mobilenetv4_conv_small_035"), 2, sgd),
    ("EfficientNet", "timm", from_timm("tinynet_e"), 2, adamw),
    ("RegNet", "timm", from_timm("regnety_002", w0=24, depth=8, stem_width=16), 2, sgd),
    ("GhostNet", "timm", from_timm("ghostnet_050"), 1, adamw),
    ("RepVGG", "timm", from_timm("repvgg_a0", width_factor=0.25), 2, sgd),
    ("HRNet", "timm", from_timm("hrnet_w18_small"), 1, sgd),
    ("ConvMixer", "timm", thin_convmixer, 2, adamw),
    ("ConvNeXt", "timm", from_timm("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48)), 2, adamw),
    ("NFNet", "timm", from_timm("dm_nfnet_f0", **NF), 2, sgd),
):
    CONVOLUTIONAL.add(name, package, make, classify, images(), optimizer, steps=steps)
