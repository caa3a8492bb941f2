"""Trainings in processes of their own, started as users start them: by ``train``, or as a script under torchrun.

What a training writes into the Python around it (globals, classes, the environment, files) ends with its process, so
that neither the plain loop nor another plan begins with it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import polylane
from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.requests import TrainRequest
from polylane.commands.running.launch import HostTraining
from polylane.errors import AuditFailed, PolylaneError, WorkerFailed
from polylane.plan.spec import parse
from polylane.recipe import Recipe
from polylane.runtime.workers.stop_request import StopRequest
from polylane.verify.audit import AuditMode

if TYPE_CHECKING:
    from tests.equivalence.trainings.training import Training

T = TypeVar("T")
Losses = list[float]

MOST_SECONDS = 60.0  # of a training of some steps
AFTER_A_FAILURE = 3.0  # seconds for the other workers to end by themselves
BATCH = 8  # samples of a step of ``train``


class Raised(Exception):
    """A process raised what is no sentence for the user, or did not end."""


# Processes ------------------------------------------------------------------------------------------------------------


def isolated(work: Callable[[], T]) -> T:
    """What a function returns in a process of its own, which no launcher has told of ranks.

    Raises:
        PolylaneError: it raised one.
        AuditFailed: it raised this, which is one.
        Raised: it raised anything else, or did not end.
    """
    return _run_processes(work, [{}])[0]


def under_torchrun(work: Callable[[], T], workers: int) -> list[T]:
    """What a function returns in each of several processes that are told of each other as torchrun does.

    Raises:
        PolylaneError: the first that failed raised one.
        Raised: the first that failed raised anything else, or one did not end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in range(workers)]
    return _run_processes(work, [{key: str(value) for key, value in each.items()} for each in ranks])


def _run_processes(work: Callable[[], T], environments: list[dict[str, str]]) -> list[T]:
    context, readers, processes = multiprocessing.get_context("fork"), list[Connection](), []
    for environment in environments:
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_report, args=(work, environment, writer))
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        return _collect(readers)
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


def _report(work: Callable[[], Any], environment: Mapping[str, str], writer: Connection) -> None:
    os.environ.update(environment)
    try:
        writer.send_bytes(pickle.dumps((True, work())))
    except BaseException as error:
        kinds = (AuditFailed, PolylaneError)
        kind = next((each for each in kinds if isinstance(error, each) and not isinstance(error, WorkerFailed)), Raised)
        told = "".join(traceback.format_exception(error)) if kind is Raised else str(error)
        writer.send_bytes(pickle.dumps((False, (kind, told))))


def _collect(readers: list[Connection]) -> list[Any]:
    results, failure, end = dict[Connection, Any](), None, time.monotonic() + MOST_SECONDS
    while len(results) < len(readers) and (left := end - time.monotonic()) > 0:
        for reader in wait([each for each in readers if each not in results], left):
            try:
                done, result = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                done, result = False, (Raised, "the process died")
            results[reader] = result  # type: ignore[index]
            if not done and failure is None:  # what follows is mostly an echo of it
                failure, end = result, min(end, time.monotonic() + AFTER_A_FAILURE)
    if failure is not None:
        raise failure[0](failure[1])
    if len(results) < len(readers):
        raise Raised(f"no end within {MOST_SECONDS:g} s")
    return [results[reader] for reader in readers]


# By a plan ------------------------------------------------------------------------------------------------------------


def by_train(training: Training, plan: str, audit: AuditMode) -> tuple[Losses, Mapping[str, Tensor]]:
    """Losses and weights of ``polylane train``: from its request on all is as on the command line."""
    assert training.data is not None
    data, losses = training.data, dict[int, float]()

    def report(rank: int, message: Mapping[str, Any]) -> None:
        if message["kind"] == "step":
            losses[message["step"]] = message["loss"]

    recipe = Recipe(
        model=training.model,
        loss=training.loss,
        optimizer=training.optimizer_or_sgd,
        data=lambda split: data() if split == "train" else None,
        path=Path(__file__),
        name="training",
        scheduler=training.scheduler,
        collate=training.collate,
    )
    with tempfile.TemporaryDirectory() as folder, patch("polylane.recipe.load", return_value=recipe):
        path, rates = Path(folder) / "model.safetensors", LearningRateOptions(batch=BATCH)
        request = TrainRequest(
            recipe="training", batch=BATCH, audit=audit, plan=parse(plan), epochs=training.epochs, rates=rates,
            model_path=path,
        )  # fmt: skip
        reporter: Any = partial(report)
        reporter.pause, reporter.keep_report = (lambda: None), (lambda report: None)
        launcher = HostTraining(request, Any, StopRequest())
        launcher.compile(request, reporter)
        launcher.start()
        return [losses[step] for step in sorted(losses)], load_file(path)


def by_script(training: Training, plan: str, audit: AuditMode) -> tuple[Losses, Mapping[str, Tensor]]:
    """Losses and weights of a user's script, which every worker runs."""
    assert training.script is not None
    script = training.script

    def start(*given: Any, **options: Any) -> Any:
        return polylane.parallelize(*given, plan=plan, audit=audit, **options)

    workers = parse(plan).workers
    if workers == 1:
        return script(start)
    return under_torchrun(lambda: script(start), workers)[0]


# On one device --------------------------------------------------------------------------------------------------------


class Plain:
    """The methods of a job in plain PyTorch, for a user's script in a single process."""

    def __init__(
        self, model: nn.Module, loss: Any, optimizer: Any, *, example: Any, scheduler: Any = None, clip_norm: Any = None
    ) -> None:
        self.model, self._loss, self._clip_norm = model, loss, clip_norm
        self.optimizer = optimizer(list(model.named_parameters()))
        self._scheduler = None if scheduler is None else scheduler(self.optimizer)

    def step(self, batch: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self._loss(self.model, batch)
        loss.backward()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return SimpleNamespace(loss=loss.item())

    def evaluate(self, batch: Any) -> float:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            loss: float = self._loss(self.model, batch).item()
        for module, mode in modes:
            module.training = mode
        return loss

    def whole_gradients(self) -> dict[str, Any]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def gathered(self, value: Any) -> list[Any]:
        return [value]

    def close(self) -> None:
        pass


def read_epochs(training: Training) -> Iterator[Any]:
    """The batches of a dataset, as a plain loop reads them: torch's loader, and samples in the order of seed 0."""
    assert training.data is not None
    dataset = training.data()
    for epoch in range(training.epochs):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if isinstance(dataset, Iterator):  # used up by the epoch before
            dataset = training.data() if epoch else dataset
        mapped = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        random = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(dataset), generator=random).tolist() if mapped else None
        stream = dataset if mapped or isinstance(dataset, IterableDataset) else _Stream(dataset)
        yield from DataLoader(stream, BATCH, sampler=order, collate_fn=training.collate, generator=torch.Generator())


class _Stream(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)
