"""Batch checks: refuses batches that differ between workers, or that are too short to train on.

With other libraries each worker loads a batch of its own; here workers would take samples of different batches. So each
worker's digest of what it has read travels with the loss of the step, in a slot of its rank, and all see all of them:

    of what          compared between
    the read order   all workers: which samples were to be read, and how what was read is nested and sized
    the contents     all workers that have read the whole batch; else those that have read the same share of it
    the options      all workers: rates, momenta and decays of the optimizer, which a script may have changed
    the settings     all workers: how often something has changed that the graph was captured with; before the step
                     where workers wait for each other within a pass, or the model reads files
    written weights  workers of the same stage: whether a script has written into the model's parameters since the step
                     before, as their version counters say, which writes through ``.data`` do not move
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.sample_shares import Batch
from polylane.errors import PolylaneError
from polylane.graph.batch import batch_signature
from polylane.program.program import Program
from polylane.runtime.data.read_digest import MASK, digest_leaves
from polylane.runtime.step_result import Digests, StepResult
from polylane.runtime.sync.objective_update import ObjectiveUpdate
from polylane.runtime.transport.protocol import Transport

# Numbers of a worker, each below 2^53: digests of the read order, of the contents and of the options, the version of
# the settings, and whether weights were written; 0: there is none.
SLOT, _READ = 5, 2
_OPTIONS = ("lr", "momentum", "betas", "weight_decay")  # those that schedules change
_OF_SCRIPT = (
    "with other options of the optimizer (learning rate, momentum, betas, weight decay)",
    "with another model or loss (an attribute, a mode, a global, a file that these read has changed, or has not)",
    "with other weights (a script has written into parameters there, or there alone not)",
)
_EVERYWHERE = "what a script changes between steps it must change on every worker, and not within `if rank == 0`"
_READ_VERSION = attrgetter("_version")
UNCHECKED_STEPS = 256  # steps of an accelerator after which it is waited for, to see what all workers have read


class BatchChecks:
    """Checks of the batches of one worker; some are collective.

    Args:
        prepared: the compiled training, equal on every worker.
        transport: connects all training workers.
        programs: programs of all workers, by rank.
        device: device of the step's result.
    """

    def __init__(
        self, prepared: CompiledTraining, transport: Transport, programs: Sequence[Program], device: torch.device
    ) -> None:
        self._prepared, self._transport, self._device = prepared, transport, device
        self._kept = deque[StepResult]()
        self._has_compared, self._turn, self._compared_steps = transport.size == 1, 0, 0
        self._all_steps: Digests = [0] * _READ
        self._all_read = False
        # Who reads the same share of a batch.
        self._shares: list[Hashable] = [(p.replica, len(p.replicas), p.takes_turns) for p in programs]
        self._stages: list[Hashable] = [p.stages for p in programs]
        plan = prepared.plan
        # Where workers wait for each other within a pass, one that runs another graph would be waited for in vain.
        self._needs_same_graph = plan.resplits_batch or plan.sync.shard == "parameters" or bool(plan.axes)
        self._is_asynchronous, self._has_servers = plan.is_asynchronous, plan.sync.has_servers
        self._what = ""  # names the batch of the latest step
        self._update: ObjectiveUpdate | None = None  # of the latest step
        self._writes = dict[int, int]()  # into the parameters of a trainer, by its id, by the end of its latest step
        self._has_peers = self._shares.count(self._shares[transport.rank]) > 1

    def take(self, batch: Any, name: str, sampled: Sequence[bool]) -> tuple[Batch, Digests, bool]:
        """Return a batch on this worker's device, digests of it, and whether it was read from a dataset here.

        Args:
            batch: a batch as a script gives it, or one that was loaded.
            name: names it in errors.
            sampled: for each leaf of the example batch, whether it is split with the samples.

        Raises:
            PolylaneError: it has no samples, or its tensors differ in their number.
        """
        local_batch: Batch = batch if isinstance(batch, Batch) else Batch.whole(batch)
        if local_batch.samples == 0:
            raise PolylaneError("the batch has no samples")
        self._what = name
        digests = self._digest(local_batch, name)
        return local_batch.to_device(sampled, self._device), digests, local_batch.read_order != 0

    def _digest(self, batch: Batch, name: str) -> Digests:
        """Return the digests of all workers, with zeros for the others; collective at the first batch.

        Args:
            batch: a batch as this worker was given it, or has read it.
            name: names the batch in errors.

        Raises:
            PolylaneError: at the first batch, where workers have read different ones.
        """
        size, rank = self._transport.size, self._transport.rank
        slots: Digests = [0] * (SLOT * size)
        if size == 1:
            return slots
        self._turn += 1
        is_whole = batch.offsets is None or bool(batch.read_samples)
        order = (batch.read_order, None if is_whole else batch_signature(batch.leaves, batch.sampled))
        slots[SLOT * rank] = 2 * zlib.crc32(repr(order).encode()) + 1
        if is_whole or self._has_peers:
            contents = digest_leaves(batch.read_samples or batch.leaves, self._turn, self._device)
            slots[SLOT * rank + 1] = 2 * contents + int(is_whole)
        if self._has_servers:  # replicas that do not wait for each other compare in the end
            latest = slots[SLOT * rank], slots[SLOT * rank + 1] * int(is_whole)  # else others have other samples
            sums = zip(self._all_steps, latest, strict=True)
            self._all_steps = [(31 * total + number) & MASK for total, number in sums]
            self._all_read = bool(batch.read_order)
        if not self._has_compared:
            # Before the first pass: batches of different sizes would end in messages that do not fit.
            self._has_compared = True
            all_slots = self._transport.all_gather_object([float(n) for n in slots[SLOT * rank : SLOT * (rank + 1)]])
            self.compare([number for slot in all_slots for number in slot], name, bool(batch.read_order))
        return slots

    def agree_on_settings(self, setting: str | None, file: str | None) -> str | None:
        """Return the file that rank 0 has seen to be changed; collective where a pass or files ask for it.

        Args:
            setting: what has changed since the latest graph was captured, in words; None if nothing has.
            file: the same of files that the user's code reads; "" if none has, None if it reads none.

        Raises:
            PolylaneError: a setting has changed on some workers alone, and all of them know it.
        """
        if self._transport.size == 1 or self._is_asynchronous or self._has_servers:  # in different steps
            return file
        if file is None and not self._needs_same_graph:
            return file
        settings = self._transport.all_gather_object([setting or "", file or ""])
        changed = [label for label, _ in settings]
        sides = _find_others([False] * len(changed), [1 + bool(label) for label in changed])
        if sides:
            label = next(filter(None, changed))
            has, has_not = sides if changed[0] else sides[::-1]
            raise PolylaneError(
                f"{self._what}: {label} has changed on {_in_words(has)}, and not on {_in_words(has_not)}: {_EVERYWHERE}"
            )
        return str(settings[0][1])

    def add_script(self, slots: Digests, update: ObjectiveUpdate, version: int) -> None:
        """Add to the digests of a step what a script may have changed on this worker alone.

        Args:
            slots: the digests that :meth:`take` has returned.
            update: the step's optimizer, and the parameters that this worker updates.
            version: number of the settings with which the step's graph was captured.
        """
        if self._transport.size > 1:
            at, self._update = SLOT * self._transport.rank, update
            # Stages of an asynchronous pipeline are at different updates, and so at different rates of a schedule.
            if not self._is_asynchronous:
                slots[at + 2] = _digest_options(update.optimizer.param_groups)
            slots[at + 3] = version + 1
            writes = self._writes.get(id(update))
            slots[at + 4] = 1 + int(writes is not None and writes != _count_writes(update))

    def compare(self, numbers: Sequence[float], what: str, was_read: bool) -> None:
        """Refuse a step that workers make of different things; all of them know the same, and raise the same.

        Args:
            numbers: digests of all workers, by rank.
            what: names the batch in errors.
            was_read: whether workers have read it from a dataset; else a script has given it to each.

        Raises:
            PolylaneError: it names the ranks that differ, and what to do.
        """
        if numbers == [*numbers[:SLOT]] * (len(numbers) // SLOT):  # of most steps this is all that is to be seen
            return
        orders, contents, *of_script = (numbers[at::SLOT] for at in range(SLOT))
        everyone: list[Hashable] = [False] * len(orders)
        for digests, words, peers in zip(of_script, _OF_SCRIPT, (everyone, everyone, self._stages), strict=True):
            if sides := _find_others(peers, digests):
                raise PolylaneError(
                    f"{what}: {_in_words(sides[1])} trained {words} than rank {sides[0][0]}: {_EVERYWHERE}"
                )
        if len(set(orders)) == len(set(contents)) == 1:
            return
        # Whoever has read the whole batch is compared with all others that have.
        shares = [None if int(number) % 2 else share for number, share in zip(contents, self._shares, strict=True)]
        kinds = [share is None for share in shares]
        if sides := _find_others(kinds, orders):
            raise PolylaneError(
                f"{what}: {_in_words(sides[1])} read other samples than rank {sides[0][0]}, or made a batch of other "
                "sizes of them: every worker must call batches() with the same dataset, of one length, and the same "
                "arguments; samples of different sizes are padded to one size in the dataset, or by a collate(samples) "
                "that does not look at the others"
            )
        sides = _find_others(shares, contents)
        if sides and was_read:
            raise PolylaneError(
                f"{what}: the dataset gave {_in_words(sides[1])} other samples than rank {sides[0][0]}: each "
                "worker must be given what one process would be; take out what makes it depend on the worker (a share "
                "of the samples by RANK or torch.distributed.get_rank(), other files on another host, random numbers "
                "of its own): batches are divided for you"
            )
        if sides:
            raise PolylaneError(
                f"{what}: {_in_words(sides[1])} gave another batch than rank {sides[0][0]}: workers must give the "
                "same whole batch, of which each takes its own samples; orders of a DataLoader part where one rank "
                "alone draws random numbers: give it generator=torch.Generator().manual_seed(0), or let "
                "job.batches(dataset, batch_size) read"
            )

    def keep(self, result: StepResult) -> None:
        """Keep the result of a step of an accelerator, for which no step waits; a loss that is read shows it, too.

        What is written into parameters from now on is written by a script.
        """
        if self._update is not None:
            self._writes[id(self._update)] = _count_writes(self._update)
        if self._device.type != "cpu":
            self._kept.append(result)
            if len(self._kept) > UNCHECKED_STEPS:
                self._check_results()

    def check_kept(self) -> None:
        """Compare what workers have read in all steps that were made so far; collective.

        Raises:
            PolylaneError: on every worker, if that is not the same.
        """
        self._check_results()
        if self._has_servers:
            self._compare_all_steps()

    def _check_results(self) -> None:
        # Before its all-reduce has ended a vector has this worker's numbers alone; to wait for that of the latest step
        # could mean to wait for a stage that waits for this one's next step.
        while self._kept and self._kept[0].is_complete:
            self._kept.popleft().check_read()

    def _compare_all_steps(self) -> None:
        """Compare sums of the digests of all steps, where replicas do not know of each other's; collective."""
        if self._turn == self._compared_steps:  # no further ones since
            return
        self._compared_steps = self._turn
        totals = self._transport.all_gather_object([self._turn, *map(int, self._all_steps)])
        if any(steps != totals[0][0] for steps, *_ in totals):  # a script has stopped early on some
            return
        # Sums of all steps may be of any parity: here each stands for whole batches.
        sums = [2 * number + 1 for _, *digests in totals for number in (*digests, *[0] * (SLOT - _READ))]
        self.compare(sums, f"the first {self._turn} steps", self._all_read)

    def refuse_unequal_sizes(self, batch: Batch) -> None:
        """Refuse samples that workers padded differently, where these must agree on sizes; collective there.

        Each worker collates the samples that it has loaded. Stages with other numbers of replicas exchange values of
        the sizes that they know; and where weights or operators are split, a form that is new is captured by all
        workers together, or they would wait for each other.
        """
        plan = self._prepared.plan
        if plan.data == 1 or not self._needs_same_graph:
            return
        signature = repr(batch_signature(batch.leaves, batch.sampled))
        if any(peer_signature != signature for peer_signature in self._transport.all_gather_object(signature)):
            raise PolylaneError(
                f"{plan.title}: workers collated their samples of a batch to different sizes, and by this plan they "
                "must be the same: pad samples to a size that does not depend on the worker, or give step() whole "
                "batches"
            )

    def refuse_short(self, batch: Batch) -> None:
        """Refuse a batch if it, or a later one of its epoch, has fewer samples than the model can be trained on."""
        fewest = self._prepared.min_samples
        label = "this batch" if batch.samples == batch.shortest else "the last batch of an epoch"
        remedy = "leave it out, with drop_last=True of batches(), or take another batch size"
        fewest.check(batch.shortest, label, remedy)


def _count_writes(update: ObjectiveUpdate) -> int:
    """Return how often the model's own tensors have been written in place; writes through ``.data`` are not counted.

    Parts that the optimizer steps on do not count: a worker that has no part of a parameter could not write one.
    """
    # Those that are guarded for the script would be asked one by one.
    with torch._C.DisableTorchFunctionSubclass():
        return sum(map(_READ_VERSION, update.full_parameters.values()))


def _digest_options(groups: Sequence[dict[str, Any]]) -> int:
    """Return a digest of options that are plain numbers, the same in every process: of what is None it would not be."""
    values = [group.get(name) for group in groups for name in _OPTIONS]
    flat = [option for value in values for option in (value if isinstance(value, tuple) else (value,))]
    return hash(tuple(each if isinstance(each, int | float) else 0.0 for each in flat)) & MASK


def _find_others(groups: Sequence[Hashable], numbers: Sequence[float]) -> tuple[list[int], ...]:
    """Return the ranks of the first group whose numbers are not all equal: the ranks like its first, the others.

    Ranks without a number are in no group; where all groups agree, nothing is returned.
    """
    for group in dict.fromkeys(groups):
        pairs = enumerate(zip(groups, numbers, strict=True))
        members = [(rank, number) for rank, (of, number) in pairs if of == group and number]
        if members and any(number != members[0][1] for _, number in members):
            peers = [rank for rank, number in members if number == members[0][1]]
            return peers, [rank for rank, number in members if number != members[0][1]]
    return ()


def _in_words(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
