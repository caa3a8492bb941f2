"""What cannot be captured: leaves and opaque models, found by export's errors or by the self-check, and named."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.batch import flatten, take_samples
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.nodes.sample_slice import SampleSlice
from tests.support import models, subsets
from tests.support.reference.eager_and_captured import SIZES, assert_unchanged, compare, run, state


class Whichever(nn.Module):
    """Its way depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, power: int = 1, *, bias: Tensor | None = None) -> Tensor:
        self.calls += 1
        y = self.fc(x)
        if y.abs().max() > 1e3:
            y = y / 2
        return y**power + (0 if bias is None else bias)


class Reassigned(nn.Module):
    """Reads its values, and has a buffer that becomes a new tensor at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("last", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) + self.last
        self.last = y.detach().mean(0)
        return y if y.sum().item() < 1e9 else -y


class Scaled(nn.Module):
    """A module whose gradient somebody changes by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_full_backward_hook(lambda module, into, out: tuple(g if g is None else g * 3 for g in into))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y.tanh()


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return y


class BySize(nn.Module):
    """It computes something else for many samples than for few."""

    def __init__(self, many: int = 2) -> None:
        super().__init__()
        self.fc, self.many = nn.Linear(16, 16), many

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * 2 if x.shape[0] > self.many else y


class OnlyOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y.squeeze(0).unsqueeze(0).tanh() if x.shape[0] == 1 else y


class Counting(nn.Module):
    """It makes a number of its number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) / sum(1 for _ in range(int(x.shape[0])))
        return y


class Numpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.from_numpy(x.detach().numpy().mean(1, keepdims=True) * 2.0)
        y: Tensor = self.fc(x) * scale
        return y


@dataclasses.dataclass
class Outputs:
    hidden: Tensor
    extra: tuple[Tensor, int]


class Structured(nn.Module):
    """A leaf that returns a dataclass with a tuple inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Whichever()

    def forward(self, x: Tensor) -> Outputs:
        y = self.inner(x)
        if bool((y != y).any()):
            y = torch.zeros_like(y)
        return Outputs(y, (y.mean(1), 7))


class Dropping(nn.Module):
    """Layers dropped at random, as in LayerDrop: random numbers and data-dependent ways at once."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()).item() < 0.3:
            return x
        y: Tensor = F.dropout(self.fc(x), 0.5, self.training)
        return y


def between(inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(16, 4))


class Around(nn.Module):
    """Passes sizes, numbers and tensors by keyword to a leaf, and reads a dataclass from another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(16))
        self.one, self.two = Whichever(), Structured()
        self.head = nn.Linear(17, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x, 2, bias=self.shared)
        x = self.one(x, power=1)
        out = self.two(x)
        logits: Tensor = self.head(torch.cat([out.hidden, out.extra[0][:, None] * out.extra[1]], 1))
        return logits


LEAVES: dict[str, tuple[Callable[[], nn.Module], list[str], str]] = {
    "data-dependent": (lambda: between(Whichever()), ["1"], "depends on the data"),
    "reassigned buffer": (lambda: between(Reassigned()), ["1"], "depends on the data"),
    "module hook": (lambda: between(Scaled()), ["1"], "has a hook on its backward pass"),
    "tensor hook": (lambda: between(Hooked()), ["1"], "registers a hook on a gradient"),
    "many or few": (lambda: between(BySize()), ["1"], "depends on the number of samples"),
    "one or more": (lambda: between(OnlyOne()), ["1"], "depends on the number of samples"),
    "very many": (lambda: between(BySize(40)), ["1"], "depends on the number of samples"),
    "counting": (lambda: between(Counting()), ["1"], "fixes the number of samples"),
    "numpy": (lambda: between(Numpy()), ["1"], ""),
    "structured": (Around, ["one", "two"], "depends on the data"),
    "nested": (lambda: between(nn.Sequential(nn.Linear(16, 16), Whichever())), ["1.1"], "depends on the data"),
}


@pytest.mark.parametrize("name", subsets.one_in(2, LEAVES))
def test_what_cannot_be_captured_is_a_leaf(name: str) -> None:
    torch.manual_seed(0)
    make, paths, why = LEAVES[name]
    model = make()
    before = state(model)
    graph = capture(model, models.classify, models.vectors(5, 0))
    assert_unchanged(before, state(model))
    assert [note.split()[0] for note in graph.notes] == paths
    assert all("is a leaf, kept whole: " in note and why in note for note in graph.notes)
    assert all("test_leaves.py:" in note or "numpy" in name for note in graph.notes), graph.notes
    assert sorted({node.module for node in graph.nodes if node.op == "leaf"}) == paths
    held = [compare(graph, copy.deepcopy(model), models.classify, models.vectors, size) for size in SIZES]
    assert all(held)
    assert [compare(graph, model, models.classify, models.vectors, size) for size in SIZES] == held


def test_a_leaf_knows_its_parameters_and_buffers() -> None:
    graph = capture(between(Whichever()), models.classify, models.vectors(5, 0))
    leaf = next(node for node in graph.nodes if node.op == "leaf")
    assert leaf.parameters == ("1.fc.weight", "1.fc.bias")
    assert leaf.buffers == ("1.calls",)
    assert leaf.requires_grad
    assert next(node for node in graph.nodes if leaf.name in node.inputs).shape == (5, 16)


OPAQUE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branching": (models.Branching, "depends on the data"),
    "hooked": (lambda: HookedRoot(), "gradient"),
    "reassigned": (lambda: ReassignedRoot(), "depends on the data"),
}


class HookedRoot(Hooked):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :4]


class ReassignedRoot(Reassigned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :4]


@pytest.mark.parametrize("name", OPAQUE)
def test_a_root_at_fault_is_opaque(name: str) -> None:
    torch.manual_seed(0)
    make, why = OPAQUE[name]
    model = make()
    before = state(model)
    graph = capture(model, models.classify, models.vectors(5, 0))
    assert_unchanged(before, state(model))
    assert graph.is_opaque
    assert len(graph.notes) == 1
    assert graph.notes[0].startswith("the model is opaque, without a graph: ")
    assert why in graph.notes[0]
    assert all(compare(graph, model, models.classify, models.vectors, size) for size in SIZES)
    leaf = graph.nodes[0]
    assert set(leaf.parameters) == {name for name, _ in model.named_parameters()}
    assert "models.py:" in leaf.source


def test_leaves_run_in_the_mode_of_the_capture() -> None:
    torch.manual_seed(0)
    model = between(Dropping())
    batch = models.vectors(5, 0)
    graph = capture(model, models.classify, batch, training=False)
    leaves, rebuild = flatten(batch)
    assert model.training
    whole = ModelWithLoss(model, models.classify, rebuild)
    losses = {float(run(graph, whole, leaves, SampleSlice(5, batch=5, step=step))[0].detach()) for step in range(5)}
    assert len(losses) == 1
    assert all(module.training for module in model.modules())


def test_random_leaves_depend_on_step_and_part_alone() -> None:
    torch.manual_seed(0)
    model = between(Dropping())
    batch = models.vectors(6, 0)
    graph = capture(model, models.classify, batch)
    assert any("random numbers of 1/leaf" in note and "user's own Python" in note for note in graph.notes)
    assert graph.code.random
    leaves, rebuild = flatten(batch)
    whole = ModelWithLoss(model, models.classify, rebuild)
    before = torch.get_rng_state()

    def loss(step: int, first: int = 0, samples: int = 6) -> float:
        part = SampleSlice(samples, first=first, batch=6, step=step)
        return float(run(graph, whole, take_samples(leaves, first, first + samples), part)[0].detach())

    assert loss(0) == loss(0)
    assert len({loss(step) for step in range(6)}) > 2
    for step in range(6):
        assert loss(step) == pytest.approx((4 * loss(step, 0, 4) + 2 * loss(step, 4, 2)) / 6, rel=1e-5)
    assert torch.equal(before, torch.get_rng_state())


def test_leaves_with_batch_statistics_share_them() -> None:
    model = between(nn.Sequential(Whichever(), Normalized()))
    graph = capture(model, models.classify, models.vectors(6, 0))
    assert graph.code.has_batch_statistics
    assert not graph.code.random
    assert not capture(model, models.classify, models.vectors(6, 0), training=False).code.has_batch_statistics


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y if y.abs().sum() >= 0 else x


# Custom functions ----------------------------------------------------------------------------------------------------


class Two(torch.autograd.Function):
    """Two outputs, a number among its arguments, nothing where an output might be, and a wrong backward on purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, y: Tensor) -> tuple[Tensor, None, Tensor]:
        ctx.save_for_backward(x)
        return x**power + y, None, x.sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, Tensor]:
        (x,) = ctx.saved_tensors
        return 5 * grads[0] + grads[2][:, None] * x, None, grads[0] * 7


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        a, nothing, b = Two.apply(y, 2, x)
        assert nothing is None
        logits: Tensor = self.head(a * b[:, None])
        return logits


def test_custom_functions_keep_their_own_backward() -> None:
    torch.manual_seed(0)
    model = Custom()
    graph = capture(model, models.classify, models.vectors(5, 0))
    assert not graph.notes
    function = next(node for node in graph.nodes if node.op == "function")
    assert "test_leaves.py:" in function.source
    assert all(compare(graph, model, models.classify, models.vectors, size) for size in SIZES)


def test_custom_functions_that_draw_are_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Noisy.apply(self.fc(x))
            return y

    graph = capture(Model(), models.classify, models.vectors(5, 0))
    assert [note.split(" may depend")[0] for note in graph.notes] == ["the random numbers of function"]
    assert graph.code.random


def test_several_faults_are_all_found() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        Hooked(),
        nn.Sequential(nn.Linear(16, 16), Whichever(), nn.Tanh()),
        Reassigned(),
        nn.Linear(16, 4),
    )
    graph = capture(model, models.classify, models.vectors(5, 0))
    assert sorted(note.split()[0] for note in graph.notes) == ["0", "1.1", "2"]
    assert all(compare(graph, model, models.classify, models.vectors, size) for size in SIZES)


def test_notes_name_the_line_that_goes_its_own_way() -> None:
    graph = capture(between(Whichever()), models.classify, models.vectors(5, 0))
    file, _, line = graph.notes[0].rpartition("(")[2].rstrip(")").rpartition(":")
    assert Path(file).name == "test_leaves.py"
    assert "y.abs().max() > 1e3" in Path(file).read_text().splitlines()[int(line) - 1]


class Windows(nn.Module):
    """Overlapping windows by as_strided, of a tensor whose memory is not in the order of its sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        samples, length = x.shape
        return x.as_strided((samples, length - 1, 2), (x.stride(0), x.stride(1), x.stride(1)))


def test_what_reads_memory_by_numbers_is_a_leaf() -> None:
    """Gathered from several workers, a tensor lies in memory otherwise than on one device."""
    model = nn.Sequential(nn.Linear(4, 4), Windows())
    graph = capture(model, lambda model, batch: model(batch).square().mean(), torch.randn(6, 4))
    assert [node.module for node in graph.nodes if node.op == "leaf"] == ["1"] and "as_strided" in graph.notes[0]
