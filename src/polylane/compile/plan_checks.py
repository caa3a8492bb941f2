"""Plan checks: gradient synchronization and optimizers that a training does not allow, refused before any worker."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch

from polylane.compile.objectives import Objective, Parameters, build_scheduler, needs_metric
from polylane.compile.optimizer_parts import are_updates_separate
from polylane.compile.optimizer_probe import build_on_trial, describe_error, draw_trial
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.graph.python_state.gradient_hooks import hooked_names
from polylane.graph.sparse_gradients import find_sparse_gradients
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.program.lower import differentiable_parameters
from polylane.program.server_assignment import assign_parameters
from polylane.samples.running_norms import find_running_norms


def check_sync(plan: Plan, partitions: Mapping[str, Partition], couples_samples: bool) -> None:
    """Refuse a plan's gradient synchronization that the training does not fit, before any worker starts.

    Raises:
        PolylaneError: the loss couples samples, or there are more servers than parameters.
    """
    # With coupled samples replicas shard the operators of one batch: no replica has a gradient of its own that could be
    # compressed, averaged later, or sent to a server.
    if couples_samples and plan.data > 1 and not plan.sync.is_plain_sum:
        raise PolylaneError(
            f"{plan.title}: sync ({','.join(plan.sync.to_words())}) is for losses that are means over samples, and in "
            "this one samples meet: leave sync out, or split by pipeline or tensor alone"
        )
    for partition in partitions.values() if plan.takes_turns else ():
        names = {n.name for s in range(plan.pipeline) if plan.degree("data", s) > 1 for n in partition.nodes(s)}
        find_running_norms(partition.graph.code.fx, names)  # for its errors alone
    if couples_samples and plan.takes_turns and plan.data > 1:
        raise PolylaneError(
            f"{plan.title}: replicas: {plan.replicas} is for losses that are means over samples, and in this one "
            "samples meet: leave replicas out, or split by pipeline or tensor alone"
        )
    if plan.sync.has_servers:
        assign_parameters(partitions, plan)  # for its errors alone
    if plan.sync.has_servers or plan.sync.shard != "none":
        _refuse_sparse(plan, partitions)
    if plan.is_asynchronous:
        _check_asynchronous(plan, partitions)


def _refuse_sparse(plan: Plan, partitions: Mapping[str, Partition]) -> None:
    """Refuse sparse gradients where gradients are packed or cut as vectors.

    Raises:
        PolylaneError: a parameter has sparse gradients.
    """
    for partition in partitions.values():
        for name in find_sparse_gradients(partition.graph):
            word = "servers" if plan.sync.has_servers else "shard"
            raise PolylaneError(
                f"{plan.title}: {word} ({','.join(plan.sync.to_words())}) takes no sparse gradients, and {name} has "
                f"them: make the embedding with sparse=False, or leave {word} out"
            )


def check_optimizers(problem: TrainingProblem, partitions: Mapping[str, Partition], plan: Plan) -> None:
    """Refuse optimizers and schedulers that cannot step, or not by this plan, before any worker starts.

    Raises:
        PolylaneError: a first step of torch's own optimizer raises; an update depends on parameters that another worker
            updates; or a scheduler needs a loss that the plan does not give.
    """
    _refuse_hooks_on_servers(plan, problem.parameters)
    sparse = {name for each in partitions.values() for name in find_sparse_gradients(each.graph)}
    for name, objective in problem.objectives.items():
        optimizer = objective.optimizer(list(problem.parameters))
        graph = partitions[name].graph
        used = differentiable_parameters(graph)
        # What gradients the user's own Python makes, sparse ones or others, is not known.
        if not any(node.is_own_python and used.intersection(node.parameters) for node in graph.nodes):
            trained = [pair for pair in problem.parameters if pair[0] in used]
            _rehearse_step(optimizer, trained, objective, sparse)
        _check_scheduler(build_scheduler(objective.scheduler, optimizer), plan)
        _refuse_coupled(problem, objective, partitions, plan, sparse)


def _rehearse_step(
    optimizer: torch.optim.Optimizer, trained: Parameters, objective: Objective, sparse: Collection[str]
) -> None:
    """Step torch's own optimizer on small parameters: an option that does not fit shows here, before any worker.

    The user's own optimizers may be written for the shapes of their model: these show it in the first real step.

    Raises:
        PolylaneError: the step raised.
    """
    own = not type(optimizer).__module__.startswith("torch.optim")
    if own or any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups):
        return  # those that are for accelerators alone do not step here
    values, (gradients, _) = draw_trial(trained, sparse)
    try:
        small, built = build_on_trial(objective.optimizer, values)
    except Exception:  # a factory that knows the shapes of its own model
        return
    try:
        for name, parameter in small.items():
            parameter.grad = gradients[name]
        built.step()
    except Exception as error:
        raise PolylaneError(f"optimizer(parameters): a first step raises {describe_error(error)}") from error


def _check_scheduler(scheduler: Any, plan: Plan) -> None:
    """Refuse a scheduler that is stepped with the loss where no worker knows that of the whole batch in time.

    Raises:
        PolylaneError: the plan has parameter servers, averages weights, or has several batches under way.
    """
    if not needs_metric(scheduler):
        return
    for word, applies in (
        (f"servers={plan.sync.server_count}", plan.sync.has_servers),
        (f"every={plan.sync.every}", plan.sync.every > 1),
        (f"schedule={plan.schedule}", plan.is_asynchronous),
    ):
        if applies:
            raise PolylaneError(
                f"{plan.title}: {word} does not give a {type(scheduler).__name__} the loss of every step, with which "
                "it is stepped: leave that out of the plan, or take a scheduler that needs none"
            )


def _refuse_coupled(
    problem: TrainingProblem,
    objective: Objective,
    partitions: Mapping[str, Partition],
    plan: Plan,
    sparse: Collection[str],
) -> None:
    """Refuse an optimizer whose updates of some parameters depend on parameters that another worker updates.

    Raises:
        PolylaneError: an update is not the same where the parameters of other stages, or of other servers, are missing.
    """
    groups, where = _parameter_groups(partitions, plan)
    if len(groups) < 2:
        return
    try:
        separate = are_updates_separate(problem.parameters, objective.optimizer, groups, sparse)
    except Exception as error:  # the user's optimizer on tensors that it was not written for: whatever it raises
        warnings.warn(
            f"{where} updates parameters on several workers, and it is not known whether the optimizer's updates of "
            f"some depend on others, because it does not run on small parameters ({describe_error(error)})",
            stacklevel=5,
        )
        return
    if not separate:
        raise PolylaneError(
            f"{plan.title}: {where} updates parameters on several workers, and the optimizer's update of some depends "
            "on others (a norm over all of them?), or on random numbers: take another optimizer, or a plan without "
            "this; a bound on the norm of all gradients is --clip-norm"
        )


def _parameter_groups(partitions: Mapping[str, Partition], plan: Plan) -> tuple[list[set[str]], str]:
    """Return the names of the parameters that are updated together, and what in the plan divides them so."""
    if plan.sync.has_servers:
        return [set(share) for share in assign_parameters(partitions, plan)], f"servers={plan.sync.server_count}"
    used = {stage: set[str]() for stage in plan.first_chunks}
    for partition in partitions.values():
        for stage in range(partition.stages):
            used[plan.first_chunk(stage)] |= set(partition.parameters(stage))
    return [names for names in used.values() if names], f"pipeline={plan.pipeline}"


def _check_asynchronous(plan: Plan, partitions: Mapping[str, Partition]) -> None:
    """Refuse a training that a pipeline cannot run without being emptied between steps.

    Raises:
        PolylaneError: there are several losses, the loss is no mean over samples, or stages share a weight.
    """
    if len(partitions) > 1:
        raise PolylaneError(
            f"{plan.title}: schedule: {plan.schedule} trains with one loss, and here are {len(partitions)}: take a "
            "schedule that waits"
        )
    (partition,) = partitions.values()
    fit.check_asynchronous(plan, partition)


def _refuse_hooks_on_servers(plan: Plan, parameters: Parameters) -> None:
    """Refuse hooks on gradients that a parameter server sums, in a process without the user's hooks."""
    if plan.sync.has_servers and (hooked := hooked_names(parameters)):
        raise PolylaneError(
            f"{plan.title}: servers sum the gradient of {hooked[0]}, and the hook on it would see one worker's part: "
            "leave servers out, or the hook"
        )
