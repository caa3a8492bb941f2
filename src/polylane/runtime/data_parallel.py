"""Data parallelism for training loops that own their steps: several optimizers, several backward passes, any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polylane.compile.batch_split import SampleShare, compute_shares
from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, to_device
from polylane.graph.operators.python_context import running_as_slice
from polylane.graph.sample_slice import SampleSlice
from polylane.runtime.data import loader as data
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.sync.gradient_strides import match_strides
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.workers.world import World


class DataParallel:
    """A model of which every worker trains a copy, each on its own samples of every batch.

    Made by :func:`polylane.data_parallel`. Inside the loop over :meth:`batches` the user's code is that of one device:
    after each ``loss.backward()`` the gradients are those of the whole batch's mean, batch normalization sees the whole
    batch, and dropout and ``torch.randn`` draw the numbers that one device would.

    Attributes:
        world: which worker this is.
        models: the user's modules, as they were given.
    """

    def __init__(self, models: tuple[nn.Module, ...], seed: int) -> None:
        self.world = World.join()
        self.models = models
        self._seed = seed
        everyone = tuple(range(self.world.size))
        connect = choose_transport(self.world)
        self._transport = connect(self.world, [], [everyone])
        self._statistics = connect(self.world, [], [everyone], tag=1, own_groups=True)
        self._parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
        for model in models:
            model.to(self.world.device)
        self._part = SampleSlice(1, batch=1)
        self._earlier_gradients: dict[int, Tensor | None] = {}
        self._seeded = False
        if self.world.size > 1:
            named = {
                f"{i}.{name}": t
                for i, m in enumerate(models)
                for name, t in [*m.named_parameters(), *m.named_buffers()]
            }
            weights.broadcast_weights(named, self._transport)
            for index, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    parameter.register_hook(self._make_grad_hook(index))
                    parameter.register_post_accumulate_grad_hook(self._refuse_unseeded)

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
        """This worker's samples of every batch, in the dataset's own form; see :meth:`polylane.Job.batches`.

        Args:
            dataset: map-style, iterable, or a list of samples.
            batch_size: samples in a batch, over all workers.
            epochs: how many times through it.
            shuffle: in a new order each epoch.
            drop_last: leave out a last batch that is shorter than the others.
            collate: samples -> batch, default torch's.
            workers: processes that load ahead.
        """
        step = 0
        join = collate or torch.utils.data.default_collate
        for epoch in range(epochs):
            for batch in data.load_batches(
                dataset, batch_size, shares=self._local_shares, epoch=epoch, seed=self._seed, shuffle=shuffle,
                drop_last=drop_last, collate=lambda samples: _CollatedBatch(join(samples)), workers=workers,
            ):  # fmt: skip
                (share,) = self._local_shares(batch.samples)
                leaves, rebuild = flatten(batch.leaves[0].batch)
                self._part = SampleSlice(
                    samples=share.samples,
                    first=share.start,
                    batch=batch.samples,
                    step=step,
                    seed=self._seed,
                    weight=share.weight,
                    sum_replicas=self._sum_replicas if self.world.size > 1 else None,
                )
                with running_as_slice(self._part, "loop"), _ScaledBackward(self):
                    yield rebuild(to_device(leaves, self.world.device))
                step += 1

    def _local_shares(self, batch: int) -> tuple[SampleShare, ...]:
        return compute_shares(batch, 1, self.world.size, self.world.rank)

    def _sum_replicas(self, tensor: Tensor) -> Tensor:
        return self._statistics.all_reduce(tensor, range(self.world.size)).wait()

    def mean(self, loss: Tensor | float) -> float:
        """The whole batch's mean of a number of which this worker has the mean over its own samples; all must ask."""
        own = float(torch.as_tensor(loss).detach()) * self._part.weight * self._part.samples / self._part.batch
        total = torch.tensor([own], dtype=torch.float64, device=self.world.device)
        return float(self._transport.all_reduce(total, range(self.world.size)).wait())

    def state_dict(self) -> dict[str, Tensor]:
        """The first model's weights, the same on every worker."""
        return self.models[0].state_dict()

    def close(self) -> None:
        """Leave the other workers, if this joined them."""
        self._transport.barrier()
        self._transport.close()
        self._statistics.close()
        self.world.leave()

    # Backward. The gradient of the whole batch's mean begins with this worker's share of the samples, before it meets
    # any batch normalization that sees all of them. A hook sees each gradient before it is accumulated; what had been
    # accumulated by earlier passes is set aside, so that only this pass's contribution is summed over the replicas.

    def backward(self, loss: Tensor, gradient: Tensor | None, *args: Any, **kwargs: Any) -> None:
        """What ``loss.backward()`` does inside the loop."""
        share = self._part.weight * self._part.samples / self._part.batch
        start = torch.ones_like(loss) if gradient is None else gradient
        self._seeded = True
        try:
            loss.backward(start * share, *args, **kwargs)
        except BaseException:
            for index, before in self._earlier_gradients.items():  # nothing was summed: as if it had not begun
                self._parameters[index].grad = before
            self._earlier_gradients = {}
            raise
        finally:
            self._seeded = False

    def _make_grad_hook(self, index: int) -> Any:
        def note(grad: Tensor) -> None:
            if not self._seeded:  # torch.autograd.grad: the user's own business
                return
            if not self._earlier_gradients:
                torch.autograd.Variable._execution_engine.queue_callback(self._reduce_gradients)
            parameter = self._parameters[index]
            if index not in self._earlier_gradients:
                self._earlier_gradients[index] = parameter.grad
                parameter.grad = None

        return note

    def _refuse_unseeded(self, _: Tensor) -> None:
        if not self._seeded:
            raise PolylaneError(
                "replicas: call loss.backward() inside the loop over batches(); nothing else is summed over them"
            )

    def _reduce_gradients(self) -> None:
        """At the end of a backward pass: sum what it gave over all replicas."""
        earlier, self._earlier_gradients = self._earlier_gradients, {}
        # Which parameters got a gradient may differ: the user's Python decides on each replica's own samples.
        reached = torch.zeros(len(self._parameters), dtype=torch.int32, device=self.world.device)
        reached[list(earlier)] = 1
        everyone = range(self.world.size)
        self._transport.all_reduce(reached, everyone).wait()
        which = reached.nonzero().flatten().tolist()
        pending = []
        for dtype in sorted({str(self._parameters[i].dtype) for i in which}):
            own = [i for i in which if str(self._parameters[i].dtype) == dtype]
            grads = [self._parameters[i].grad if i in earlier else None for i in own]
            flat = torch.cat(
                [
                    torch.zeros_like(self._parameters[i]).flatten() if g is None else g.flatten()
                    for i, g in zip(own, grads, strict=True)
                ]
            )
            pending.append((own, self._transport.all_reduce(flat, everyone)))
        for own, transfer in pending:
            pieces = transfer.wait().split([self._parameters[i].numel() for i in own])
            for i, piece in zip(own, pieces, strict=True):
                parameter = self._parameters[i]
                before = earlier.get(i, parameter.grad)
                grad = match_strides(piece.view_as(parameter), parameter)
                parameter.grad = grad.clone() if before is None else before + grad


class _ScaledBackward(TorchFunctionMode):
    """Lets ``loss.backward()`` begin with the replica's share of the batch."""

    def __init__(self, replicas: DataParallel) -> None:
        super().__init__()
        self._replicas = replicas

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward:
            gradient = args[1] if len(args) > 1 else kwargs.pop("gradient", None)
            return self._replicas.backward(args[0], gradient, *args[2:], **kwargs)
        return func(*args, **kwargs)


class _CollatedBatch:
    """A collated batch as one leaf, so that it keeps its form."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def data_parallel(*models: nn.Module, seed: int = 0) -> DataParallel:
    """Make models replicas of those of the other workers that torchrun started, for a loop that owns its steps.

    Alone, without torchrun, the same loop runs on one worker.

    Args:
        models: ordinary modules, changed in nothing but hooks on their parameters; weights of rank 0 count.
        seed: of the order of samples and of all random numbers.

    Raises:
        PolylaneError: no model is given, or one is no ``nn.Module``.
    """
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise PolylaneError("data_parallel takes one nn.Module or several")
    return DataParallel(models, seed)
