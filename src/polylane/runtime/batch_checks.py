"""Batch checks: refuses batches that workers have otherwise than each other, or that are too short to train on."""

from __future__ import annotations

from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError
from polylane.graph.batch import batch_signature
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.transport.protocol import Transport


class BatchChecks:
    """Checks of the batches of one worker; some are collective.

    Args:
        prepared: the compiled training, equal on every worker.
        transport: connects all training workers.

    Attributes:
        has_compared: whether a batch was compared with those of the other workers, or there are none.
    """

    def __init__(self, prepared: CompiledTraining, transport: Transport) -> None:
        self._prepared, self._transport, self.has_compared = prepared, transport, transport.size == 1

    def refuse_different(self, batch: Batch) -> None:
        """Refuse a whole batch that is not the same on every worker; collective, once, at the first such batch.

        With other libraries each worker loads a batch of its own; here workers would take samples of different batches.
        """
        self.has_compared = True
        own = [weights.digest_tensor(leaf) for leaf in batch.leaves if isinstance(leaf, Tensor)]
        if any(other != own for other in self._transport.all_gather_object(own)):
            raise PolylaneError(
                "workers gave step() different batches: give each of them the same whole batch, of which it takes its "
                "own samples, or let job.batches(dataset, batch_size) load only those"
            )

    def refuse_unequal_sizes(self, batch: Batch) -> None:
        """Refuse samples that workers padded differently, where these must agree on sizes; collective there.

        Each worker collates the samples that it has loaded. Stages with other numbers of replicas exchange values of
        the sizes that they know; and where weights or operators are split, a form that is new is captured by all
        workers together, or they would wait for each other.
        """
        plan = self._prepared.plan
        together = plan.resplits_batch or plan.sync.shard == "parameters" or bool(plan.axes)
        if plan.data == 1 or not together:
            return
        own = repr(batch_signature(batch.leaves, batch.sampled))
        if any(other != own for other in self._transport.all_gather_object(own)):
            raise PolylaneError(
                f"{plan.title}: workers collated their samples of a batch to different sizes, and by this plan they "
                "must be the same: pad samples to a size that does not depend on the worker, or give step() whole "
                "batches"
            )

    def refuse_short(self, batch: Batch) -> None:
        """Refuse a batch if it, or a later one of its epoch, has fewer samples than the model can be trained on."""
        fewest = self._prepared.min_samples
        what = "this batch" if batch.samples == batch.shortest else "the last batch of an epoch"
        remedy = "leave it out, with drop_last=True of batches(), or take another batch size"
        fewest.check(batch.shortest, what, remedy)
