"""Networks with batch normalization that others wrote, held by ``verify`` against one device: no false verdict.

From torchvision and timm, with random weights, on small images and odd batches: what a proof says of them must be
"equal", or the refusal must be honest. ``make zoo-batchnorm`` installs both beside polylane (the extra ``zoo``) and
writes the table; ``python -m benchmarks.zoo_batch_norm --only mobilenet_v2 --plans tensor=2`` a part of it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import make_parser
from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.runtime.workers.fork import limit_to_one_thread
from polylane.verify.verify import Verdict, verify

PLANS = ("data=2", "data=3", "tensor=2", "pipeline=2,microbatches=3")
BATCH, SIDE, CLASSES = 7, 32, 10
STEPS = (1, 2, 3, 4)


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-3, weight_decay=0.05)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


# The networks ---------------------------------------------------------------------------------------------------------


def torchvision_loads() -> None:
    """Let torchvision be imported where its compiled operators do not load beside this build of torch.

    Its import describes some of them, which must be there for that; no network here calls one.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401

        torchvision_loads.library = library  # type: ignore[attr-defined]  # what it defines goes with it


def from_torchvision(name: str, **how: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        from torchvision import models

        made: nn.Module = getattr(models, name)(weights=None, num_classes=CLASSES, **how)
        return made

    return model


def from_timm(name: str, **how: Any) -> Callable[[], nn.Module]:
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


def thin_convmixer() -> nn.Module:
    from timm.models.convmixer import ConvMixer

    made: nn.Module = ConvMixer(32, 6, kernel_size=5, patch_size=4, num_classes=CLASSES)
    return made


THIN = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 64)}  # of timm's residual networks

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": from_torchvision("mobilenet_v2", width_mult=0.35),
    "mobilenet_v3_small": from_torchvision("mobilenet_v3_small"),
    "efficientnet_b0": from_torchvision("efficientnet_b0"),
    "resnet18 (thin)": thin_resnet("BasicBlock", (2, 2, 1, 1), width_per_group=64),
    "resnet50 (thin)": thin_resnet("Bottleneck", (1, 2, 2, 1), width_per_group=32),
    "resnext (thin)": thin_resnet("Bottleneck", (1, 1, 1, 1), groups=4, width_per_group=8),
    "densenet (thin)": thin_densenet,
    "googlenet": from_torchvision("googlenet", aux_logits=True, init_weights=False),
    "shufflenet_v2": from_torchvision("shufflenet_v2_x0_5"),
    "mnasnet": from_torchvision("mnasnet0_5"),
    "regnet_y": from_torchvision("regnet_y_400mf"),
    "ghostnet": from_timm("ghostnet_050"),
    "seresnet (thin)": from_timm("seresnet50", **THIN),
    "skresnet (thin)": from_timm("skresnet18", **THIN),
    "ecaresnet (thin)": from_timm("ecaresnet26t", **THIN),
    "resnetblur (thin)": from_timm("resnetblur18", **THIN),
    "res2net (thin)": from_timm("res2net50_14w_8s", **THIN),
    "convmixer (thin)": thin_convmixer,
    "lcnet": from_timm("lcnet_050"),
    "tinynet": from_timm("tinynet_e"),
    "mixnet": from_timm("mixnet_s"),
    "mobilenetv4": from_timm("mobilenetv4_conv_small_050"),
    "repvgg": from_timm("repvgg_a0"),
    "mobileone": from_timm("mobileone_s0"),
    "rexnet": from_timm("rexnet_100"),
    "dla": from_timm("dla46_c"),
    "vovnet": from_timm("ese_vovnet19b_slim_dw"),
    "hrnet": from_timm("hrnet_w18_small"),
    "levit": from_timm("levit_128s", img_size=SIDE),
    "mobilevit": from_timm("mobilevit_xxs"),
    "mobilevitv2": from_timm("mobilevitv2_050"),
    "fastvit": from_timm("fastvit_t8"),
    "xcit": from_timm("xcit_nano_12_p8_224", img_size=SIDE),
    "starnet": from_timm("starnet_s1"),
}


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy; of auxiliary heads too, at 0.3 each, as Inception's are trained."""
    out = model(batch[0])
    if not isinstance(out, tuple):
        return F.cross_entropy(out, batch[1])
    heads = [F.cross_entropy(head, batch[1]) for head in out if head is not None]
    return heads[0] + 0.3 * sum(heads[1:])


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH, 3, SIDE, SIDE, generator=random),
            torch.randint(0, CLASSES, (BATCH,), generator=random),
        )
        for _ in range(steps)
    ]


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What was proven of a network.

    Attributes:
        verdict: "equal", "NOT equal", "refused" or "FAILED".
        told: the worst error and where it is; or what was said.
    """

    network: str
    plan: str
    optimizer: str
    steps: int
    verdict: str
    told: str
    seconds: float

    def __str__(self) -> str:
        training = f"{self.optimizer}, {self.steps} step{'s' if self.steps > 1 else ''}"
        return f"| {self.network} | {self.plan} | {training} | {self.verdict} | {self.told} | {self.seconds:.0f} s |"


def prove_one(network: str, plan: str, optimizer: str, steps: int) -> Row:
    """Hold one network by one plan against one device."""
    began = time.monotonic()
    try:
        torch.manual_seed(0)
        model = NETWORKS[network]().train()
        verdict = verify(model, Objective("loss", classify, OPTIMIZERS[optimizer]), batches(steps), plan)
        said, told = "equal" if verdict.passed else "NOT equal", _worst(verdict)
    except PolylaneError as refusal:
        said, told = "refused", str(refusal)
    except Exception as error:  # to be shown beside the others
        said, told = "FAILED", f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    gc.collect()
    return Row(network, plan, optimizer, steps, said, told, time.monotonic() - began)


def _worst(verdict: Verdict) -> str:
    """The largest errors: of a loss, of a gradient, of a value, and what the first difference is."""
    gradient = max(verdict.deviations, key=lambda d: d.gradient or 0.0)
    value = max(verdict.deviations, key=lambda d: d.value)
    told = f"loss {verdict.loss_error:.0e}, gradient {gradient.gradient or 0.0:.0e}, value {value.value:.0e}"
    if undetermined := verdict.undetermined:
        told += f"; {len(undetermined)} of {len(verdict.deviations)} tensors have what rounding alone makes"
    if verdict.passed:
        return told
    unequal = "" if verdict.replicas_equal else ", replicas disagree"
    return f"{told} ({value.name}){unequal}; {verdict.culprit}"


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Every network by every plan and optimizer, at varying numbers of steps."""
    every = [list(enumerate(of)) for of in (options.only, options.optimizers, options.plans)]
    for (n, network), (o, optimizer), (p, plan) in itertools.product(*every):
        yield prove_one(network, plan, optimizer, options.steps[(n + o + p) % len(options.steps)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table; 1 if any verdict is false."""
    parser = make_parser("benchmarks.zoo_batch_norm", __doc__)
    parser.add_argument("--only", nargs="+", metavar="NETWORK", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--plans", nargs="+", metavar="PLAN", default=list(PLANS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS), help="taken in turn")
    options = parser.parse_args(arguments)
    if options.quick:
        options.only, options.plans = options.only[:1], options.plans[:1]
        options.optimizers, options.steps = options.optimizers[:1], [1]
    limit_to_one_thread()
    warnings.simplefilter("ignore")
    try:
        torchvision_loads()
    except ModuleNotFoundError as missing:
        parser.error(f"{missing}: `make zoo-batchnorm` installs it")
    print(
        "| network | plan | training | verdict | worst relative errors, or what was said | |\n|---|---|---|---|---|---|"
    )
    counts: dict[str, int] = {}
    for row in rows(options):
        counts[row.verdict] = counts.get(row.verdict, 0) + 1
        print(row, flush=True)
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return int(any(verdict != "equal" for verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
