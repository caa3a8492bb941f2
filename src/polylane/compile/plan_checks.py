"""Plan checks: gradient synchronization and optimizers that a training does not allow, refused before any worker."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from polylane.compile.objectives import Objective, Parameters, build_scheduler, needs_metric
from polylane.compile.optimizer_parts import explain_coupling, find_unshardable
from polylane.compile.optimizer_trials import build_on_trial, draw_trial, trying
from polylane.compile.python_effects import refuse_effects
from polylane.errors import PolylaneError, describe_error
from polylane.graph.partition import Partition
from polylane.graph.python_state.gradient_hooks import hooked_names
from polylane.graph.sparse_gradients import find_sparse_gradients
from polylane.optim.modes import has_modes
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.program.lower import differentiable_parameters
from polylane.program.server_assignment import assign_parameters
from polylane.samples.running_norms import find_running_norms


def check_plan(
    parameters: Parameters, objectives: Mapping[str, Objective], partitions: Mapping[str, Partition], plan: Plan
) -> None:
    """Refuse a plan that a training does not fit, whatever its optimizers compute, before any worker starts.

    Args:
        parameters: all parameters of the model and its losses, by name.
        objectives: the losses with their optimizers and schedulers, by name.
        partitions: the graph of every objective, cut into the plan's stages.
        plan: the plan that is checked.

    Raises:
        PolylaneError: a sentence for the user.
    """
    for partition in partitions.values():
        refuse_effects(partition, plan)
        _refuse_idle_ranks(partition, plan)
    check_sync(plan, partitions)
    _refuse_hooks_on_servers(plan, parameters)
    for objective in objectives.values():
        _check_scheduler(objective, parameters, plan)


def _refuse_idle_ranks(partition: Partition, plan: Plan) -> None:
    """Refuse an axis with more ranks than the longest dimension of any tensor, so that some had no part of any."""
    graph = partition.graph
    shapes = [*(node.shape for node in graph.nodes), *(info.shape for info in graph.parameters.values())]
    longest = max((size for shape in shapes for size in shape), default=1)
    for axis in plan.axes:
        if plan.degree(axis) > longest:
            raise PolylaneError(
                f"{axis}={plan.degree(axis)}: nothing in the model can be cut into so many parts, its longest "
                f"dimension is {longest}: lower {axis}"
            )


def check_sync(plan: Plan, partitions: Mapping[str, Partition]) -> None:
    """Refuse a plan's gradient synchronization that the training does not fit, before any worker starts.

    Raises:
        PolylaneError: there are more servers than parameters, sparse gradients or running norms that the rule does not
            take, or a pipeline without a flush cannot train it.
    """
    for partition in partitions.values() if plan.takes_turns else ():
        names = {n.name for s in range(plan.pipeline) if plan.degree("data", s) > 1 for n in partition.nodes(s)}
        find_running_norms(partition.graph.code.fx, names)  # for its errors alone
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


def check_optimizers(
    parameters: Parameters, objectives: Mapping[str, Objective], partitions: Mapping[str, Partition], plan: Plan
) -> None:
    """Refuse optimizers that cannot step, or not by this plan, before any worker starts.

    Raises:
        PolylaneError: a first step of torch's own optimizer raises; or an update depends on parameters that another
            worker updates.
    """
    sparse = {name for partition in partitions.values() for name in find_sparse_gradients(partition.graph)}
    for name, objective in objectives.items():
        optimizer = objective.optimizer(list(parameters))
        refuse_kept_gradients(parameters, objective, optimizer)
        graph = partitions[name].graph
        used = differentiable_parameters(graph)
        _refuse_second_evaluation(parameters, objective, sparse)
        # What gradients the user's own Python makes, sparse ones or others, is not known.
        if not any(node.is_own_python and used.intersection(node.parameters) for node in graph.nodes):
            trained = [pair for pair in parameters if pair[0] in used]
            _rehearse_step(optimizer, trained, objective, sparse)
        _refuse_coupled(parameters, objective, partitions, plan, sparse)
        if has_modes(optimizer):
            _refuse_exchanges(type(optimizer).__name__, plan)


def refuse_kept_gradients(parameters: Parameters, objective: Objective, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that makes an update of the gradients of several steps, by a ``zero_grad`` of its own.

    Raises:
        PolylaneError: gradients are left in place; it has been tried for a few steps.
    """
    if getattr(optimizer.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad:
        return
    trial = draw_trial(parameters)
    try:
        trial_parameters, optimizer = build_on_trial(objective.optimizer, trial.values)
        with trying():
            for gradients in (*trial.steps, *trial.steps):
                for name, parameter in trial_parameters.items():
                    parameter.grad = gradients[name].clone()
                optimizer.step()
                optimizer.zero_grad()
                if any(p.grad is not None and p.grad.any() for g in optimizer.param_groups for p in g["params"]):
                    raise PolylaneError(
                        f"{type(optimizer).__name__}.zero_grad() leaves gradients in place, so that those of several "
                        "steps make one update, and a step of a plan makes one of its own batch: take a batch as large "
                        "as theirs together; microbatches divide it where memory is short"
                    )
    except PolylaneError:
        raise
    except Exception:  # it does not run on small parameters: a plan's workers say how it fails on the model's own
        return


def _refuse_second_evaluation(parameters: Parameters, objective: Objective, sparse: Collection[str]) -> None:
    """Refuse an optimizer whose ``step()`` runs only with a closure, as of sharpness-aware minimization.

    Raises:
        PolylaneError: without a closure a step raises, and with one it calls it.
    """
    trial = draw_trial(parameters, sparse)

    def take_step(has_closure: bool) -> bool:
        """Return whether a closure was called."""
        small, built = build_on_trial(objective.optimizer, trial.values)
        evaluations = iter(trial.steps)

        def evaluate() -> Tensor:
            for parameter, gradient in zip(small.values(), next(evaluations).values(), strict=True):
                parameter.grad = gradient.clone()
            return torch.ones(())

        evaluate()
        built.step(evaluate) if has_closure else built.step()  # type: ignore[arg-type]
        return next(evaluations, None) is not trial.steps[1]

    with trying():
        try:
            take_step(False)
            return
        except Exception as error:  # the user's optimizer on tensors that it was not written for: whatever it raises
            words = describe_error(error)
        try:
            called = take_step(True)
        except Exception:  # it fails with a closure as well: the first step of the training will say why
            return
    if called:
        raise PolylaneError(
            f"{_name_optimizer(parameters, objective)}.step() needs a closure that evaluates the loss again ({words}), "
            "which no plan does within the optimizer: take an optimizer whose step() uses the gradients that are there"
        )


def _refuse_exchanges(name: str, plan: Plan) -> None:
    """Refuse an optimizer that exchanges weights where others read, average or keep these between steps.

    Raises:
        PolylaneError: the plan has parameter servers, averages weights, or has several batches under way.
    """
    for word in _find_loose_keys(plan):
        raise PolylaneError(
            f"{plan.title}: {name}.train() and eval() exchange the weights that are trained for those that are "
            f"evaluated, and {word} hands weights on between steps: leave that out of the plan"
        )


def _find_loose_keys(plan: Plan) -> list[str]:
    """Return the keys of a plan by which not all workers have made the same updates after a step."""
    keys = (
        (f"servers={plan.sync.server_count}", plan.sync.has_servers),
        (f"every={plan.sync.every}", plan.sync.every > 1),
        (f"schedule={plan.schedule}", plan.is_asynchronous),
    )
    return [key for key, applies in keys if applies]


def explain_coupled_updates(parameters: Parameters, objective: Objective, sparse: Collection[str]) -> str:
    """Return why an optimizer's update of some parameter depends on others; "" if none does, or it cannot be tried.

    It is tried on the first and the second half of the parameters, and on every second one: a norm over several, of a
    layer or of all, is then never complete.
    """
    names = [name for name, _ in parameters]
    if len(names) < 2:
        return ""
    half = len(names) // 2
    groups = (names[:half], names[half:], names[::2], names[1::2])
    try:
        return explain_coupling(parameters, objective.optimizer, groups, sparse)
    except Exception:  # as in :func:`_refuse_coupled`, which warns of it
        return ""


def refuse_coupled_search(parameters: Parameters, objective: Objective, plan: Plan, reason: str) -> None:
    """Refuse, of an optimizer with coupled updates, plans by which several workers update parameters.

    Raises:
        PolylaneError: the plan has a pipeline, several servers, or shares out updates over replicas.
    """
    if len(plan.first_chunks) > 1 or plan.sync.server_count > 1:
        raise PolylaneError(
            f"{plan.title}: it updates parameters on several workers, and {_name_optimizer(parameters, objective)} "
            f"{reason}: take another optimizer"
        )
    if plan.sync.shard != "none" and plan.data > 1:
        find_unshardable(parameters, [objective.optimizer])  # for its error alone


def _name_optimizer(parameters: Parameters, objective: Objective) -> str:
    return type(objective.optimizer(list(parameters))).__name__


def _rehearse_step(
    optimizer: torch.optim.Optimizer, trained: Parameters, objective: Objective, sparse: Collection[str]
) -> None:
    """Step torch's own optimizer on small parameters: an option that does not fit shows here, before any worker.

    The user's own optimizers may be written for the shapes of their model: these show it in the first real step.

    Raises:
        PolylaneError: the optimizer's step raised an exception.
    """
    is_custom = not type(optimizer).__module__.startswith("torch.optim")
    if is_custom or any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups):
        return  # those that are for accelerators alone do not step here
    trial = draw_trial(trained, sparse)
    try:
        small, built = build_on_trial(objective.optimizer, trial.values)
    except Exception:  # a factory that knows the shapes of its own model
        return
    try:
        for name, parameter in small.items():
            parameter.grad = trial.steps[0][name]
        built.step()
    except Exception as error:
        raise PolylaneError(f"optimizer(parameters): a first step raises {describe_error(error)}") from error


def _check_scheduler(objective: Objective, parameters: Parameters, plan: Plan) -> None:
    """Refuse a scheduler that cannot be built, or is stepped with a loss that no worker knows in time.

    Raises:
        PolylaneError: it raises; or the plan has parameter servers, averages weights, or has several batches under way.
    """
    if objective.scheduler is None:
        return
    scheduler = build_scheduler(objective.scheduler, objective.optimizer(list(parameters)))
    if not needs_metric(scheduler):
        return
    for word in _find_loose_keys(plan):
        raise PolylaneError(
            f"{plan.title}: {word} does not give a {type(scheduler).__name__} the loss of every step, with which "
            "it is stepped: leave that out of the plan, or take a scheduler that needs none"
        )


def _refuse_coupled(
    parameters: Parameters,
    objective: Objective,
    partitions: Mapping[str, Partition],
    plan: Plan,
    sparse: Collection[str],
) -> None:
    """Refuse an optimizer whose updates of some parameters depend on parameters that another worker updates.

    Raises:
        PolylaneError: an update is not the same where the parameters of other stages, or of other servers, are missing.
    """
    groups, option = _parameter_groups(partitions, plan)
    if len(groups) < 2:
        return
    try:
        reason = explain_coupling(parameters, objective.optimizer, groups, sparse)
    except Exception as error:  # the user's optimizer on tensors that it was not written for: whatever it raises
        warnings.warn(
            f"{option} updates parameters on several workers, and it is not known whether the optimizer's updates of "
            f"some depend on others, because it does not run on small parameters ({describe_error(error)})",
            stacklevel=5,
        )
        return
    if reason:
        clips = "; a bound on the norm of all gradients is --clip-norm" if "several parameters" in reason else ""
        raise PolylaneError(
            f"{plan.title}: {option} updates parameters on several workers, and "
            f"{_name_optimizer(parameters, objective)} {reason}: take another optimizer, or a plan without this{clips}"
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
