"""Replaced parameters: reentrant checkpoints are refused where a module's parameters are replaced, and nowhere else."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polylane.errors import PolylaneError
from polylane.graph.capture.python.replaced_parameters import parameters_replaced


def reentrant(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(torch.sin, x, use_reentrant=True)
    return result


def test_reentrant_checkpoints_are_refused_inside_and_work_after() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with parameters_replaced("encoder"), pytest.raises(PolylaneError, match=r"^encoder calls"):
        reentrant(x)
    reentrant(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().cos())


def test_two_threads_that_end_in_the_order_in_which_they_began_leave_nothing_behind() -> None:
    """The order in which a stand-in that each thread put in place and took away was left behind."""
    second_began, first_ended = threading.Event(), threading.Event()

    def first() -> None:
        with parameters_replaced("first"):
            assert second_began.wait(10)
        first_ended.set()

    def second() -> None:
        with parameters_replaced("second"):
            second_began.set()
            assert first_ended.wait(10)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    while not second_began.wait(0.01):
        pass
    # This thread has replaced nothing: its checkpoints work meanwhile.
    assert reentrant(torch.ones(1, requires_grad=True)).requires_grad
    for thread in threads:
        thread.join()
    assert reentrant(torch.ones(1, requires_grad=True)).requires_grad


def test_a_copied_parameter_is_told() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(PolylaneError, match="the model copies its parameters"), parameters_replaced(""):
        copy.deepcopy(leaf * 2)
