"""Vision transformers, hybrids with convolutions and perceptrons, of timm, torchvision and transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from benchmarks.zoo.entry import CLASSES, Family, classify, images
from benchmarks.zoo.models.convolutional import from_timm

VISION_TRANSFORMERS = Family("vision_transformers", "Vision transformers, hybrids, perceptrons")

SIDE = {"img_size": 32}
PATCHES = {"img_size": 32, "patch_size": 8}
NARROW = {"embed_dim": 32, "depth": 2, "num_heads": 4}


def thin_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, num_classes=CLASSES)


def of_timm(module: str, model: str, *arguments: Any, **how: Any) -> Callable[[], nn.Module]:
    """A model of timm by its module and class, which says more of its shape than the names of ``create_model`` do."""

    def make() -> nn.Module:
        made: nn.Module = getattr(import_module(f"timm.models.{module}"), model)(*arguments, num_classes=CLASSES, **how)
        return made

    return make


def thin_maxxvit(*blocks: str) -> Callable[[], nn.Module]:
    """A model of convolutions (C), of attention (T), or of both with windows and grids of 2 by 2 (M), thin."""

    def make() -> nn.Module:
        from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg

        attention = MaxxVitTransformerCfg(dim_head=8, window_size=(2, 2), grid_size=(2, 2))
        shape = MaxxVitCfg((16, 16, 32, 32), (1, 1, 1, 1), blocks, stem_width=8, transformer_cfg=attention)
        made: nn.Module = MaxxVit(shape, img_size=64, num_classes=CLASSES)
        return made

    return make


def thin_caformer() -> nn.Module:
    from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv

    mixers, norms = [SepConv, SepConv, Attention, Attention], [LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2
    made: nn.Module = MetaFormer(
        depths=(1, 1, 1, 1), dims=(32, 32, 64, 64), token_mixers=mixers, norm_layers=norms, num_classes=CLASSES
    )
    return made


def thin_poolformer() -> nn.Module:
    from timm.models.metaformer import GroupNorm1, MetaFormer

    shape = {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 32), "num_classes": CLASSES, "use_mlp_head": False}
    kind = {"downsample_norm": None, "mlp_act": nn.GELU, "mlp_bias": True, "norm_layers": GroupNorm1}
    made: nn.Module = MetaFormer(**shape, **kind, layer_scale_init_values=1e-5, res_scale_init_values=None)
    return made


def thin_mixer(
    block: str, mlp: str = "Mlp", norm: Any = nn.LayerNorm, ratio: Any = (0.5, 4.0)
) -> Callable[[], nn.Module]:
    """A network of perceptrons, by the names of its block and of the perceptron in it."""

    def make() -> nn.Module:
        from timm import layers
        from timm.models import mlp_mixer

        of = {"block_layer": getattr(mlp_mixer, block), "mlp_layer": getattr(layers, mlp), "mlp_ratio": ratio}
        norm_layer = getattr(mlp_mixer, norm) if isinstance(norm, str) else norm
        made: nn.Module = mlp_mixer.MlpMixer(
            CLASSES, 32, patch_size=8, num_blocks=2, embed_dim=32, norm_layer=norm_layer, **of
        )
        return made

    return make


def own_image_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss that the model itself returns, without labels."""
    loss: Tensor = model(pixel_values=batch[0]).loss
    return loss


def classify_images(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss that the model itself returns, of its labels."""
    loss: Tensor = model(pixel_values=batch[0], labels=batch[1]).loss
    return loss


def thin_mae() -> nn.Module:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    decoder = {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64,
    }
    return ViTMAEForPreTraining(ViTMAEConfig(**shape, **decoder, image_size=32, patch_size=8))


def thin_dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2, "num_labels": CLASSES}
    return Dinov2ForImageClassification(Dinov2Config(**shape, image_size=32, patch_size=8))


WINDOWS = {"window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
LEVIT = {"embed_dim": (32, 48, 64), "depth": (1, 1, 1), "num_heads": (2, 3, 4), "key_dim": 8}
VOLO = {"embed_dims": (32, 48, 48, 48), "num_heads": (2, 4, 4, 4), "stem_hidden_dim": 16}
EFFICIENTFORMER = {"depths": (1, 1, 2, 2), "embed_dims": (16, 16, 32, 48)}
CROSSVIT = {"embed_dim": (16, 32), "num_heads": (2, 4), "depth": ((1, 2, 0),), "mlp_ratio": (2, 2, 1)}
HIERA = {"embed_dim": 16, "stages": (1, 1, 2, 1), "mask_unit_size": (4, 4), "q_pool": 2}

for name, make in (
    ("DeiT", from_timm("deit_tiny_distilled_patch16_224", **PATCHES, **NARROW)),
    ("Swin", from_timm("swin_tiny_patch4_window7_224", **SIDE, **WINDOWS)),
    ("SwinV2", from_timm("swinv2_tiny_window8_256", **SIDE, **WINDOWS)),
    ("CaiT", from_timm("cait_xxs24_224", **PATCHES, **NARROW, depth_token_only=1)),
    ("PoolFormer", thin_poolformer),
    ("CAFormer", thin_caformer),
    ("LeViT", from_timm("levit_128s", **SIDE, **LEVIT)),
    (
        "EfficientFormerV2",
        from_timm("efficientformerv2_s0", img_size=64, **EFFICIENTFORMER),
    ),
    ("MobileViT", from_timm("mobilevit_xxs")),
    ("FastViT", from_timm("fastvit_t8", layers=(1, 1, 1, 1), embed_dims=(16, 32, 64, 128))),
    ("EdgeNeXt", from_timm("edgenext_xx_small", depths=(1, 1, 2, 1), dims=(16, 32, 32, 48), heads=(4, 4, 4, 4))),
    ("BEiT", from_timm("beit_base_patch16_224", **PATCHES, **NARROW)),
    ("MLP-Mixer", thin_mixer("MixerBlock")),
    ("gMLP", thin_mixer("SpatialGatingBlock", "GatedMlp", ratio=4)),
    ("ResMLP", thin_mixer("ResBlock", norm="Affine", ratio=4)),
    ("VOLO", of_timm("volo", "VOLO", [1, 1, 1, 1], img_size=32, **VOLO)),
    ("XCiT", from_timm("xcit_nano_12_p8_224", **SIDE, **NARROW, cls_attn_layers=1)),
    ("PVTv2", from_timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 4))),
    ("CrossViT", from_timm("crossvit_9_240", **SIDE, img_scale=(1.0, 1.0), patch_size=(4, 8), **CROSSVIT)),
    ("Hiera", of_timm("hiera", "Hiera", (64, 64), **HIERA)),
):
    VISION_TRANSFORMERS.add(name, "timm", make, classify, images(64 if name in ("EfficientFormerV2", "Hiera") else 32))

for name, blocks in (("MaxViT", "MMMM"), ("CoAtNet", "CCTT")):
    VISION_TRANSFORMERS.add(name, "timm", thin_maxxvit(*blocks), classify, images(64))
VISION_TRANSFORMERS.add("ViT", "torchvision", thin_vit, classify, images())
VISION_TRANSFORMERS.add("DINOv2", "transformers", thin_dinov2, classify_images, images())
VISION_TRANSFORMERS.add("ViT-MAE", "transformers", thin_mae, own_image_loss, images())
