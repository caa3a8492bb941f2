"""Data parallelism for the user's own training loop: several optimizers, several backward passes, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from polylane.compile.sample_shares import SampleShare, compute_shares
from polylane.diagnosis.page_layout import Phase
from polylane.errors import PolylaneError
from polylane.graph.batch import to_device
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.python_context import running_as_slice
from polylane.graph.python_state.gradient_hooks import GradientHooks, OwnHook, hooked_names
from polylane.runtime.data import loader as data
from polylane.runtime.data.read_trial import ReadTrials
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.progress.script_calls import collective
from polylane.runtime.progress.script_watch import ScriptOnHang, watch_script
from polylane.runtime.progress.watched_transport import watch_transports
from polylane.runtime.sync.pass_sums import PassSums
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.workers.world import World


class NoModule(PolylaneError, AttributeError):
    """A use of what :func:`polylane.data_parallel` returns as if it were the model."""


class DataParallel:
    """Models that are replicated on every worker, each of which trains on its own samples of a batch, like torch's DDP.

    Created by ``polylane.data_parallel``. Inside the loop over ``batches`` your code is that of one device:
    after each ``loss.backward()`` the gradients are those of the mean over the whole batch, batch normalization uses
    the statistics of the whole batch, and dropout and ``torch.randn`` draw the same numbers as on one device.

    Attributes:
        world: this worker's rank, device and backend.
        models: the modules that were passed in.

    Examples:
        A loop that takes a step only where the gradients are small; the examples of the methods go on with it:

        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> dataset = [(torch.ones(8), torch.zeros(1)) for _ in range(32)]
        >>> replicas = polylane.data_parallel(model)
    """

    def __init__(
        self,
        models: tuple[nn.Module, ...],
        seed: int,
        on_hang: ScriptOnHang | None = "stop",
        hang_after: float | None = None,
    ) -> None:
        self.world = watch_script(World.join(), on_hang, hang_after)
        self.models = models
        self._seed = seed
        everyone = tuple(range(self.world.size))
        # Batch statistics have a group of their own: their collectives come inside passes, and would get in between
        # those of the gradients in another order on each worker.
        connect = watch_transports(choose_transport(self.world), self.world.progress)
        self._transport = connect(self.world, [], [everyone], exchanges=False)
        self._statistics = connect(self.world, [], [everyone], tag=1, own_groups=True, exchanges=False)
        self._parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
        for model in models:
            model.to(self.world.device)
        self._part, self._trials = SampleSlice(1, batch=1), ReadTrials(self.world.rank == 0)
        self._seeded, self._completing, self._passes = False, False, 0
        self._named = {str(i): parameter for i, parameter in enumerate(self._parameters)}
        self._hooks, self._of_hooks = GradientHooks(self._named), dict[str, Tensor | None]()
        self._sums = PassSums(self._named, self._transport)
        self._watched = set[str]()
        if self.world.size > 1:
            # Rank 0's weights count: replicas must begin equal, since only gradients are summed from then on.
            named = {
                f"{i}.{name}": t
                for i, m in enumerate(models)
                for name, t in [*m.named_parameters(), *m.named_buffers()]
            }
            weights.broadcast_weights(named, self._transport)
        self._watch_trained()
        self.world.progress.enter(Phase.SCRIPT)

    def __getattr__(self, name: str) -> Any:
        raise NoModule(
            f"polylane.data_parallel returns no module, and has no {name}: call and ask the model that you gave it, "
            "which is the same object, inside of a loop over its batches()"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__("forward")

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: data.Collate | None = None,
        workers: int = 0,
    ) -> Iterator[Any]:
        """Yield this worker's samples of every batch, in the dataset's own form; see ``polylane.Job.batches``.

        Args:
            dataset: map-style or iterable dataset, or a list of samples.
            batch_size: number of samples in a batch, over all workers.
            epochs: number of passes over the dataset.
            shuffle: reshuffle the dataset in each epoch.
            drop_last: drop the last batch of an epoch if it is incomplete.
            collate: merges a list of samples into a batch. Default: torch's ``default_collate``.
            workers: number of processes that load ahead.

        Yields:
            This worker's samples, collated.

        Examples:
            >>> for inputs, targets in replicas.batches(dataset, batch_size=16, epochs=2):
            ...     optimizer.zero_grad()
            ...     loss = torch.nn.functional.mse_loss(model(inputs), targets)
            ...     loss.backward()
            ...     if model.weight.grad.norm() < 10:
            ...         optimizer.step()
        """
        step = 0
        for epoch in range(epochs):
            batches = data.load_batches(
                dataset, batch_size, shares=self._local_shares, epoch=epoch, seed=self._seed, shuffle=shuffle,
                drop_last=drop_last, collate=collate, workers=workers, trials=self._trials,
            )  # fmt: skip
            for batch in self.world.progress.loading(batches):
                (share,) = self._local_shares(batch.samples)
                assert batch.form is not None
                self._part = SampleSlice(
                    samples=share.samples,
                    first=share.start,
                    batch=batch.samples,
                    step=step,
                    seed=self._seed,
                    weight=share.weight,
                    sum_replicas=self._sum_replicas if self.world.size > 1 else None,
                )
                # While the user's loop body runs, random operators and batch normalization know which samples of the
                # whole batch these are.
                with running_as_slice(self._part, "loop"), _ScaledBackward(self):
                    yield batch.form.rebuild(to_device(batch.leaves_of(share), self.world.device))
                step += 1

    def _local_shares(self, batch: int) -> tuple[SampleShare, ...]:
        return compute_shares(batch, 1, self.world.size, self.world.rank)

    @collective("the model's forward (batch normalization)")
    def _sum_replicas(self, tensor: Tensor) -> Tensor:
        return self._statistics.all_reduce(tensor, range(self.world.size)).wait()

    @collective("replicas.mean")
    def mean(self, loss: Tensor | float) -> float:
        """Return the mean over the whole batch of a number that is a mean over this worker's samples; collective.

        Args:
            loss: this worker's mean, a number or a scalar tensor.

        Returns:
            The mean over all samples of the batch, the same on every worker.

        Examples:
            >>> replicas.mean(loss) == loss.item()
            True
        """
        summand = float(torch.as_tensor(loss).detach()) * self._part.weight * self._part.samples / self._part.batch
        total = torch.tensor([summand], dtype=torch.float64, device=self.world.device)
        return float(self._transport.all_reduce(total, range(self.world.size)).wait())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the first model's weights, the same on every worker.

        Returns:
            The tensors of ``models[0].state_dict()``.

        Examples:
            >>> list(replicas.state_dict())
            ['weight', 'bias']
        """
        return self.models[0].state_dict()

    @collective("replicas.close")
    def close(self) -> None:
        """Close the connections and leave the other workers, if this joined them; collective.

        Examples:
            >>> replicas.close()
        """
        self._transport.barrier()
        self._transport.close()
        self._statistics.close()
        self.world.leave()

    # Backward. The gradient of the whole batch's mean begins with this worker's share of the samples as its seed: the
    # scaling must come before any batch normalization that sums over all replicas. A hook sees each gradient before it
    # is accumulated; what earlier passes accumulated is set aside, so that only this pass's contribution is summed. The
    # user's own hooks would see this worker's part: they are off until the sum is there, and get that, on one worker
    # too, so that they draw equal random numbers.

    @collective("loss.backward")
    def backward(self, loss: Tensor, gradient: Tensor | None, *args: Any, **kwargs: Any) -> None:
        """Run ``loss.backward()`` with this replica's share of the samples as seed, and sum the gradients.

        Args:
            loss: the tensor that backward was called on.
            gradient: the user's own seed; None for a scalar loss.
            args, kwargs: further arguments of ``Tensor.backward``.

        Raises:
            PolylaneError: the pass failed on another worker; or gradients are to be differentiated again.
        """
        if self._seeded:  # inside of a backward pass, as checkpoints call it: what it starts from is scaled already
            loss.backward(gradient, *args, **kwargs)
            return
        share = self._part.weight * self._part.samples / self._part.batch
        start = torch.ones_like(loss) if gradient is None else gradient
        seed = start * share
        if self.world.size == 1 and not hooked_names(self._named.items()):
            loss.backward(seed, *args, **kwargs)
            return
        if self.world.size > 1 and (kwargs.get("create_graph") or args[1:2] == (True,)):
            raise PolylaneError(
                "loss.backward(create_graph=True): the sum of gradients over replicas cannot be differentiated again; "
                "of gradients of each sample's own, take torch.autograd.grad(..., create_graph=True) into the loss"
            )
        self._passes += 1
        self._watch_trained()
        with self._hooks.taken_off():
            self._sum_pass(loss, seed, *args, **kwargs)
            self._complete_hooked()

    def _sum_pass(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, and add the sums of its gradients to those of earlier passes."""
        self._sums.begin()
        self._seeded = True
        try:
            loss.backward(*args, **kwargs)
        except BaseException:
            self._sums.abandon()
            raise
        finally:
            self._seeded = False
        for summed in self._sums.end():
            parameter, gradient = self._named[summed.name], summed.gradient
            if summed.name in self._hooks.taken:
                parameter.grad, self._of_hooks[summed.name] = gradient, summed.earlier
                continue
            parameter.grad = gradient if summed.earlier is None else _accumulate(summed.earlier, gradient)

    def _complete_hooked(self) -> None:
        """Give the summed gradients to the user's hooks, and add what these make of them to those of earlier passes."""
        earlier, self._of_hooks = self._of_hooks, {}
        self._completing = True
        try:
            with _disable_current_modes():  # what hooks draw is no sample's
                self._hooks.run({n: self._named[n] for n in earlier}, self._seed, self._passes, earlier)
        finally:
            self._completing = False

    def _watch_trained(self) -> None:
        """Register hooks on parameters that require a gradient and have none: a loop may unfreeze some later."""
        for name, parameter in self._named.items():
            if parameter.requires_grad and name not in self._watched:
                self._watched.add(name)
                parameter.register_hook(OwnHook(self._make_grad_hook(name)))
                if self.world.size > 1:
                    parameter.register_post_accumulate_grad_hook(OwnHook(self._refuse_unseeded))

    def _make_grad_hook(self, name: str) -> Any:
        def note(_: Tensor) -> None:
            if self._seeded:  # else it is from torch.autograd.grad, whose results are not summed
                self._sums.set_aside(name)

        return note

    def _refuse_unseeded(self, _: Tensor) -> None:
        if not (self._seeded or self._completing):
            raise PolylaneError(
                "replicas: call loss.backward() inside the loop over batches(); nothing else is summed over them"
            )


def _accumulate(earlier: Tensor, gradient: Tensor) -> Tensor:
    """Add a gradient to that of earlier passes, in its memory, as autograd does: who holds it sees the sum."""
    with torch.no_grad():
        return earlier.add_(gradient)


class _ScaledBackward(TorchFunctionMode):
    """Redirects ``loss.backward()`` to :meth:`DataParallel.backward`."""

    def __init__(self, replicas: DataParallel) -> None:
        super().__init__()
        self._replicas = replicas

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward:
            gradient = args[1] if len(args) > 1 else kwargs.pop("gradient", None)
            return self._replicas.backward(args[0], gradient, *args[2:], **kwargs)
        return func(*args, **kwargs)


def data_parallel(
    *models: nn.Module, seed: int = 0, on_hang: ScriptOnHang | None = "stop", hang_after: float | None = None
) -> DataParallel:
    """Replicate models over the workers that torchrun started, for a training loop of your own.

    Without torchrun the same loop runs on one worker.

    Args:
        models: ordinary modules; hooks are registered on their parameters, and the weights of rank 0 are broadcast.
        seed: seed of the order of samples and of all random numbers of the models.
        on_hang: what to do if a worker hangs, as in ``polylane.parallelize``. Since the loop is your own code, a worker
            that others wait for is reported, but considered hung only after 9 min 30 s, unless it is stopped.
        hang_after: seconds without progress after which a stopped worker is considered hung. Default: 8 s more than a
            step.

    Returns:
        What yields this worker's batches; see ``polylane.runtime.data_parallel.DataParallel``.

    Raises:
        PolylaneError: no model is given, or one is not an ``nn.Module``; or an option is wrong.

    Examples:
        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> replicas = polylane.data_parallel(model)
        >>> dataset = [(torch.ones(8), torch.zeros(1)) for _ in range(32)]
        >>> for inputs, targets in replicas.batches(dataset, batch_size=16):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(inputs), targets)
        ...     loss.backward()
        ...     optimizer.step()
    """
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise PolylaneError("data_parallel takes one nn.Module or several")
    return DataParallel(models, seed, on_hang, hang_after)
