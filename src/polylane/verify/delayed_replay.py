"""Replay of an asynchronous pipeline: in one process, each batch's gradient on the weights that its stages had.

Narayanan et al., "PipeDream", SOSP 2019, section 3.3: stage s computes batch t on the weights after t - d updates,
where d is the stage's delay (:func:`polylane.schedule.asynchronous.weight_delays`), and the gradient is applied to the
newest. Before a batch of another form the pipeline is emptied, and that batch lacks no update. None of the runtime's
code takes part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polylane.compile.sample_shares import Batch
from polylane.plan.lanes import stage_graph_of
from polylane.schedule.asynchronous import weight_delays
from polylane.verify.local_sgd_reference import ReferenceReplica
from polylane.verify.record import ComparedTraining, ReferenceRun


def replay_delayed(training: ComparedTraining) -> ReferenceRun:
    """Train by the rule of an asynchronous schedule in this process; the training's model is not changed.

    Args:
        training: the training that is compared, with its plan.

    Returns:
        The loss of each step, on the weights that the stages had; the state after the last update. There are no
        gradients to compare: each is gone when the next one comes.
    """
    prepared, plan = training.prepared, training.prepared.plan
    replica = ReferenceReplica(training, 0, 1)
    graph = stage_graph_of(prepared.main_partition, plan)
    delays = weight_delays(plan.schedule, graph, plan.most_turns, plan.vertical_sync)
    delay_of = {name: delays[stages[0]] for name, stages in prepared.owning_stages.items()}
    versions = {0: _copy(replica.trained_parameters)}  # version -> values
    losses = list[float]()
    for step, emptied in enumerate(_last_emptied(training)):
        _write(replica, {n: versions[max(emptied, step - delay_of.get(n, 0))][n] for n in replica.trained_parameters})
        total, count = replica.loop.backward(step)
        gradients = {name: gradient.clone() for name, gradient in replica.loop.named_gradients().items()}
        losses.append(total / count)
        _write(replica, versions[step])
        for name, parameter in replica.trained_parameters.items():
            parameter.grad = gradients.get(name)
        replica.update_weights()
        versions[step + 1] = _copy(replica.trained_parameters)
        versions.pop(step - max(delays), None)
    state = {name: value.detach().clone() for name, value in replica.model.state_dict().items()}
    return ReferenceRun(losses, {}, state, [], replica.loop.is_eager)


def _last_emptied(training: ComparedTraining) -> list[int]:
    """Return for every batch the first one that came into an empty pipeline together with it.

    Batches whose form differs run different graphs, which are never under way at the same time.
    """
    batches = training.batches
    sampled = Batch.whole(batches[0]).sampled
    has_readings = training.prepared.reads_whole_batches
    first_batches, last_form = list[int](), None
    for number, batch in enumerate(batches):
        cpu_batch = Batch.whole(batch).to_device(sampled, torch.device("cpu"))
        graph = id(training.compiled_for(number)) if has_readings else 0  # which differs with a batch's answers, too
        form = training.batch_form(number, cpu_batch.sampled), graph
        first_batches.append(first_batches[-1] if form == last_form else number)
        last_form = form
    return first_batches


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _write(replica: ReferenceReplica, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in replica.trained_parameters.items():
            parameter.copy_(values[name])
