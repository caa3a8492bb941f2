"""Segmentation, detection and video, of torchvision, segmentation_models_pytorch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import CLASSES, SAMPLES, Family, classify, numbers

DENSE = Family("dense", "Segmentation, detection, video")

UNLABELLED = 255  # of a pixel that the loss leaves out
CELLS = 64 + 16 + 4 + 1  # of the feature maps of the pyramids below
ANCHORS = 3  # a cell


# Segmentation ---------------------------------------------------------------------------------------------------------


def pixels(side: int = 32, samples: int = SAMPLES) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    """Batches of images, [samples, 3, side, side], and a label a pixel, some of them UNLABELLED."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, CLASSES, (samples, side, side), generator=numbers(1000 + step))
        unlabelled = torch.rand(samples, side, side, generator=numbers(2000 + step)) < 0.1
        images = torch.randn(samples, 3, side, side, generator=numbers(step))
        return images, labels.masked_fill(unlabelled, UNLABELLED)

    return lambda steps: [batch(step) for step in range(steps)]


def segment(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the labelled pixels; of torchvision's models, whose outputs are a dictionary, too."""
    out = model(batch[0])
    if not isinstance(out, dict):
        return F.cross_entropy(out, batch[1], ignore_index=UNLABELLED)
    losses = {name: F.cross_entropy(logits, batch[1], ignore_index=UNLABELLED) for name, logits in out.items()}
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def dice(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The package's own loss for segmentation, over all pixels of the batch."""
    from segmentation_models_pytorch.losses import DiceLoss

    loss: Tensor = DiceLoss("multiclass", ignore_index=UNLABELLED)(model(batch[0]), batch[1])
    return loss


def from_smp(name: str, encoder: str = "resnet18", depth: int = 3, **how: Any) -> Callable[[], nn.Module]:
    """A model of segmentation_models_pytorch on an encoder, with random weights."""

    def make() -> nn.Module:
        import segmentation_models_pytorch as smp

        shape = {"encoder_name": encoder, "encoder_depth": depth, "encoder_weights": None, "classes": CLASSES}
        made: nn.Module = getattr(smp, name)(**shape, **how)
        return made

    return make


def thin_backbone(**layers: str) -> nn.Module:
    """torchvision's residual network up to the given layers, as its segmentation models take it."""
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import BasicBlock, ResNet

    return IntermediateLayerGetter(ResNet(BasicBlock, [1, 1, 1, 1]), return_layers=layers)


def thin_fcn() -> nn.Module:
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    made: nn.Module = FCN(thin_backbone(layer3="aux", layer4="out"), FCNHead(512, CLASSES), FCNHead(256, CLASSES))
    return made


def thin_deeplab() -> nn.Module:
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3

    made: nn.Module = DeepLabV3(thin_backbone(layer3="out"), DeepLabHead(256, CLASSES, atrous_rates=(1, 2, 3)))
    return made


def lraspp() -> nn.Module:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    made: nn.Module = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
    return made


# Detection ------------------------------------------------------------------------------------------------------------


def boxes(side: int = 64, samples: int = SAMPLES) -> Callable[[int], list[dict[str, Tensor]]]:
    """Batches of images and what each anchor is to predict: a class, one-hot and mostly none, and a box."""

    def batch(step: int) -> dict[str, Tensor]:
        places = CELLS * ANCHORS
        classes = torch.randint(0, 8 * CLASSES, (samples, places), generator=numbers(1000 + step))
        return {
            "images": torch.randn(samples, 3, side, side, generator=numbers(step)),
            "classes": F.one_hot(classes, 8 * CLASSES)[..., :CLASSES].float(),
            "boxes": torch.randn(samples, places, 4, generator=numbers(2000 + step)),
        }

    return lambda steps: [batch(step) for step in range(steps)]


def detect(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """RetinaNet's loss: focal loss of all anchors and L1 of those with an object, over the number of the latter."""
    from torchvision.ops import sigmoid_focal_loss

    out = model(batch["images"])
    objects = batch["classes"].sum(-1)
    count = objects.sum().clamp(min=1)
    classes = sigmoid_focal_loss(out["cls_logits"], batch["classes"], reduction="sum") / count
    away = F.l1_loss(out["bbox_regression"], batch["boxes"], reduction="none").sum(-1)
    loss: Tensor = classes + (away * objects).sum() / count
    return loss


class FeaturesAndHead(nn.Module):
    """A backbone that gives a dictionary of feature maps, and the head of a detector on their list."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Any:
        return self.head(list(self.backbone(images).values()))


def thin_pyramid() -> nn.Module:
    """torchvision's feature pyramid on its MobileNetV2: maps of 8, 4, 2 and 1 cells a side."""
    from torchvision.models import mobilenet_v2
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    features = mobilenet_v2(weights=None, width_mult=0.35).features
    layers = {"6": "0", "13": "1", "17": "2"}
    made: nn.Module = BackboneWithFPN(features, layers, [16, 32, 112], 32, extra_blocks=LastLevelMaxPool())
    return made


def thin_retinanet() -> nn.Module:
    from torchvision.models.detection.retinanet import RetinaNetHead

    return FeaturesAndHead(thin_pyramid(), RetinaNetHead(32, ANCHORS, CLASSES))


def thin_ssd() -> nn.Module:
    from torchvision.models.detection.ssd import SSDHead

    return FeaturesAndHead(thin_pyramid(), SSDHead([32] * 4, [ANCHORS] * 4, CLASSES))


def objects(side: int = 32, samples: int = SAMPLES) -> Callable[[int], list[dict[str, Any]]]:
    """Batches of images, each with a list of objects, three for an odd image and two for an even one."""

    def label(step: int, sample: int) -> dict[str, Tensor]:
        many, random = 2 + sample % 2, numbers(10 * step + sample)
        return {
            "class_labels": torch.randint(0, CLASSES, (many,), generator=random),
            "boxes": 0.25 + torch.rand(many, 4, generator=random) / 2,
        }

    def batch(step: int) -> dict[str, Any]:
        images = torch.randn(samples, 3, side, side, generator=numbers(1000 + step))
        return {"pixel_values": images, "labels": [label(step, sample) for sample in range(samples)]}

    return lambda steps: [batch(step) for step in range(steps)]


def match_objects(model: Any, batch: dict[str, Any]) -> Tensor:
    """The loss that the model itself returns: its queries are matched to the objects first."""
    loss: Tensor = model(**batch).loss
    return loss


def thin_yolos() -> nn.Module:
    from transformers import YolosConfig, YolosForObjectDetection

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return YolosForObjectDetection(
        YolosConfig(**shape, image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=CLASSES)
    )


# Video ----------------------------------------------------------------------------------------------------------------


def clips(frames: int = 4, side: int = 16, samples: int = SAMPLES) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    """Batches of videos, [samples, 3, frames, side, side], and labels."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        videos = torch.randn(samples, 3, frames, side, side, generator=numbers(step))
        return videos, torch.randint(0, CLASSES, (samples,), generator=numbers(1000 + step))

    return lambda steps: [batch(step) for step in range(steps)]


def thin_video_resnet(stem: str, first: str, rest: str) -> Callable[[], nn.Module]:
    """torchvision's residual network on videos, a block a stage, by the convolutions of its first and other stages."""

    def make() -> nn.Module:
        from torchvision.models.video import resnet

        convolutions = [getattr(resnet, first), *[getattr(resnet, rest)] * 3]
        return resnet.VideoResNet(resnet.BasicBlock, convolutions, [1, 1, 1, 1], getattr(resnet, stem), CLASSES)

    return make


def thin_mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return MViT((16, 16), 4, blocks, True, True, True, True, dropout=0.1, num_classes=CLASSES)


def thin_swin3d() -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    return SwinTransformer3d([2, 4, 4], 16, [2, 1], [2, 4], [2, 2, 2], num_classes=CLASSES)


FPN = {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32}

for name, make, loss in (
    ("U-Net", from_smp("Unet", decoder_channels=(32, 16, 8)), segment),
    ("U-Net++", from_smp("UnetPlusPlus", "mobilenet_v2", decoder_channels=(32, 16, 8)), dice),
    (
        "FPN",
        from_smp("FPN", "mobilenet_v2", depth=5, **FPN),
        segment,
    ),
    ("DeepLabV3+", from_smp("DeepLabV3Plus", "mobilenet_v2", depth=5, decoder_channels=32), segment),
    ("SegFormer", from_smp("Segformer", "mit_b0", depth=5, decoder_segmentation_channels=32), segment),
    ("MAnet", from_smp("MAnet", "mobilenet_v2", decoder_channels=(32, 16, 8), decoder_pab_channels=8), dice),
):
    DENSE.add(name, "segmentation_models_pytorch", make, loss, pixels())
DENSE.add("FCN", "torchvision", thin_fcn, segment, pixels())
DENSE.add("DeepLabV3", "torchvision", thin_deeplab, segment, pixels())
DENSE.add("LR-ASPP", "torchvision", lraspp, segment, pixels())
DENSE.add("RetinaNet", "torchvision", thin_retinanet, detect, boxes())
DENSE.add("SSD", "torchvision", thin_ssd, detect, boxes())
DENSE.add("YOLOS", "transformers", thin_yolos, match_objects, objects())
SIMPLE, FLAT, APART = "Conv3DSimple", "Conv3DNoTemporal", "Conv2Plus1D"
DENSE.add("R3D", "torchvision", thin_video_resnet("BasicStem", SIMPLE, SIMPLE), classify, clips(), steps=1)
DENSE.add("MC3", "torchvision", thin_video_resnet("BasicStem", SIMPLE, FLAT), classify, clips())
DENSE.add("R(2+1)D", "torchvision", thin_video_resnet("R2Plus1dStem", APART, APART), classify, clips())
DENSE.add("MViT", "torchvision", thin_mvit, classify, clips())
DENSE.add("Swin3D", "torchvision", thin_swin3d, classify, clips())
