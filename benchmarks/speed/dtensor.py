"""torch's own tensor parallelism as a contender: DTensor, by torch's recipe for transformers, written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.contenders import Task
from benchmarks.harness import Contender


class LocalHeads(nn.Module):
    """The example's attention for a share of its heads, on local tensors.

    DTensor cuts the rows of a weight into consecutive parts: so that each part holds the queries, keys and values of
    the same heads, the rows of the fused projection are put in that order first.
    """

    def __init__(self, attention: Any, ranks: int) -> None:
        super().__init__()
        self.qkv, self.out = attention.qkv, attention.out
        self.heads = attention.heads // ranks
        for parameter in (self.qkv.weight, self.qkv.bias):
            parameter.data = parameter.data.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def split_gpt(model: Any, mesh: DeviceMesh) -> None:
    """Columns, then rows, in every attention and every MLP; the vocabulary, tied, is cut at both ends."""
    for block in model.blocks:
        block.attention = LocalHeads(block.attention, mesh.size())
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    model.head.weight = model.token.weight


def split_mlp(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Every other layer by columns, the ones between by rows."""
    layers = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    parallelize_module(
        model, mesh, {name: RowwiseParallel() if i % 2 else ColwiseParallel() for i, name in enumerate(layers)}
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same fused AdamW as everyone's; it takes DTensors and tensors in groups of their own."""
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    groups = [{"params": group} for group in (cut, whole) if group]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, fused=True)


def dtensor(task: Task, split: Callable[[Any, DeviceMesh], None], ranks: int = 2) -> Contender:
    """Training with every parameter that can be cut cut over the ranks, the loss too."""

    def setup(rank: int) -> Callable[[], float]:
        mesh = init_device_mesh("cpu", (ranks,))
        model = copy.deepcopy(task.model)
        split(model, mesh)
        steps = optimizer(model)

        def step() -> float:
            steps.zero_grad()
            with loss_parallel():
                loss = task.loss(model, task.batch)
                loss.backward()
            steps.step()
            return _number(loss)

        return step

    return Contender("torch DTensor, tensor parallel", ranks, setup)


def dtensor_forward(task: Task, split: Callable[[Any, DeviceMesh], None], ranks: int = 2) -> Contender:
    """The loss alone, without gradients."""

    def setup(rank: int) -> Callable[[], float]:
        mesh = init_device_mesh("cpu", (ranks,))
        model = copy.deepcopy(task.model).eval()
        split(model, mesh)

        def step() -> float:
            with torch.no_grad():
                return _number(task.loss(model, task.batch))

        return step

    return Contender("torch DTensor, tensor parallel", ranks, setup)


def _number(loss: Tensor) -> float:
    return float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())
