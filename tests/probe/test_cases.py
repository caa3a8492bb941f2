"""The cases of a sweep: they run, and what they ask of a device is what was meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polylane.probe import cases as sweep
from polylane.probe.cases import OperatorCase
from tests.support.known_measurements import small

CASES = {f"{case.name} {index}": case for index, case in enumerate((*small(), *sweep.cpu_cases()))}


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_an_operation_of_its_family(name: str) -> None:
    case = CASES[name]
    found = case.describe_operation(torch.float32)
    assert found.kind == case.family
    assert found.forward.products or found.forward.bytes > 0
    assert found.backward.products or found.backward.bytes > 0


@pytest.mark.parametrize("case", small(), ids=lambda case: case.name)
def test_small_cases_run_forward_and_backward(case: OperatorCase) -> None:
    arguments = case.make_arguments(torch.float64, "cpu")
    out = case.target(*arguments)
    learning = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    gradients = torch.autograd.grad(out.sum(), learning)
    assert [g.shape for g in gradients] == [each.shape for each in learning]


def test_cases_for_gpus_are_no_larger_than_their_memory() -> None:
    for case in sweep.gpu_cases():
        arguments = case.make_arguments(torch.bfloat16, "meta")
        given = sum(each.nbytes for each in arguments if isinstance(each, Tensor))
        assert given + case.target(*arguments).nbytes < 4 << 30
        assert case.describe_operation(torch.bfloat16).kind == case.family


def test_sweeps_have_every_family_and_shapes_from_tall_to_wide() -> None:
    for cases in (sweep.cpu_cases(), sweep.gpu_cases()):
        assert {case.family for case in cases} == {"matmul", "convolution", "attention", "memory"}
        products = [
            case.describe_operation(torch.float32).forward.products[0] for case in cases if case.family == "matmul"
        ]
        assert min(p.m / p.n for p in products) < 1 / 50 and max(p.m / p.n for p in products) > 50
        assert max(p.flops for p in products) > 1e4 * min(p.flops for p in products)
