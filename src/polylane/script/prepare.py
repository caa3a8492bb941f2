"""``polylane.prepare``: an ordinary training loop under any plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from polylane.compile.unusable_modules import refuse_unusable_modules
from polylane.errors import PolylaneError
from polylane.faults import told_as_fault
from polylane.graph.python_state.compiler import without_compiler
from polylane.graph.python_state.random_generators import generators_kept
from polylane.output import say_at_once
from polylane.plan.plan import AnyPlan
from polylane.runtime.guarded_tensors import guard_of
from polylane.runtime.state.random_state import collect_generators, restore_generators
from polylane.runtime.workers.launch_environment import Launch
from polylane.runtime.workers.world import World
from polylane.script.deferred import record_functions
from polylane.script.loading.input_layout import BatchDim
from polylane.script.loading.loader_shares import divides_batches, share_loaders
from polylane.script.loop import TrainingLoop
from polylane.script.model_results import ModelCall
from polylane.script.model_state.updates import ScriptUpdates
from polylane.script.optimizer_calls import list_with_nested
from polylane.script.prepared_model import PreparedModel
from polylane.script.resuming.loader import LoopObserver, follow_loader
from polylane.script.resuming.progress import ScriptProgress
from polylane.script.resuming.shared_saves import share_saves
from polylane.script.session import RANK_VARIABLE, ScriptSession, current_session
from polylane.script.start import read_plan
from polylane.script.whole_metrics import keep_metrics_whole
from polylane.verify.audit import AuditMode

T = TypeVar("T")


@told_as_fault("polylane.prepare")
def prepare(
    *objects: Any,
    plan: str | AnyPlan | None = None,
    batch_dim: BatchDim | None = None,
    audit: AuditMode | None = None,
    whole_batches: bool = False,
) -> Any:
    """Prepare the models, optimizers, loaders and schedulers of a training loop, which stays as it is.

    Args:
        objects: models, optimizers, data loaders and learning-rate schedulers, in any order. A script that writes
            its weights without an optimizer gives none.
        plan: the plan. Default: that of ``polylane run --plan``, or of the environment variable ``POLYLANE_PLAN``;
            without one, the objects are returned as they are.
        batch_dim: dimension along which the tensors that the loop gives to its models and losses have the samples, 1
            for (length, batch); or a function that returns it for a tensor, or None for one that belongs to the batch
            as a whole. Default: found by lengths that agree, dimension 0 first, and proven before it is used.
        audit: "auto" computes some steps a second time on one device, within 1% of the training's time, and raises an
            error where loss or gradients differ; "warn" warns of it, "stop" audits more often, "off" never. Default:
            that of ``polylane run --audit``, or "auto".
        whole_batches: whether every worker reads whole batches, also where reading its own samples would do.

    Returns:
        The objects in the same order; a single one by itself.

    Raises:
        PolylaneError: no model is given, or one that was prepared before, or a list of objects; or the plan takes
            another number of workers. What the loop may not do is refused later, with its line.

    Examples:
        The loop of one device, with one line more:

        >>> import torch, polylane
        >>> model = torch.nn.Linear(8, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
        >>> model, optimizer, loader = polylane.prepare(model, optimizer, loader)
        >>> for inputs, labels in loader:
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        ...     loss.backward()
        ...     optimizer.step()

        ``python train.py`` runs it on one device; ``polylane run train.py --plan data=2,pipeline=2`` on four.
    """
    session = current_session()
    plan = session.choose_plan(plan)
    _refuse_containers(objects)
    models = [value for value in dict.fromkeys(objects) if isinstance(value, nn.Module)]
    session.nudge_weights(models)
    if plan is None:
        _leave_plain(session, models)
        return _in_order(objects, {})
    if audit not in (None, *get_args(AuditMode)):
        raise PolylaneError(f"audit={audit!r}: give one of {', '.join(get_args(AuditMode))}")
    optimizers = [value for value in objects if isinstance(value, torch.optim.Optimizer)]
    _refuse_unusable(models)
    # A loop that writes the weights itself has none: this one says what is trained, and never steps.
    optimizers = optimizers or [ScriptUpdates([p for model in models for p in model.parameters() if p.requires_grad])]
    progress = session.progress if session.progress.is_active else None
    plain_models = [without_compiler(model) for model in models]
    loaders = [value for value in objects if isinstance(value, DataLoader)]
    _refuse_distributed(plain_models, loaders)
    loop = open_loop(plain_models, optimizers, plan, batch_dim, progress)
    loop.runner.audit_mode = audit or loop.runner.audit_mode
    pairs = enumerate(zip(models, plain_models, strict=True))
    prepared = {id(m): PreparedModel(loop, ModelCall(i), plain, is_compiled=plain is not m) for i, (m, plain) in pairs}
    session.hold(models=prepared.values())
    if not whole_batches and divides_batches(plan):
        loop.loader_shares += share_loaders(loaders, loop)
    if progress is not None:
        known_ids = {id(value) for value in (*models, *optimizers, *loaders)}
        schedulers = [o for o in objects if id(o) not in known_ids and hasattr(o, "load_state_dict")]
        _follow(progress, loop, loaders, schedulers)
    return _in_order(objects, prepared)


def _leave_plain(session: ScriptSession, models: Sequence[nn.Module]) -> None:
    """Leave models as they are, for there is no plan; processes of a launcher are told that each trains by itself."""
    session.hold(models=models)
    launch = Launch()
    with suppress(PolylaneError):  # variables of another program's, which a plain script need not heed
        launch = Launch.of_process() if session.world is None else launch
    if launch.size > 1 and launch.is_first:
        say_at_once(
            f"{launch.size} processes without a plan train each by itself, the whole script: start them with -m -- "
            "polylane run SCRIPT --plan PLAN, or set POLYLANE_PLAN"
        )


def _follow(
    progress: ScriptProgress, loop: TrainingLoop, loaders: Sequence[DataLoader[Any]], schedulers: Sequence[Any]
) -> None:
    """Let checkpoints hold where the loop is in its loaders, and the states of its schedulers."""
    for number, loader in enumerate(loaders):
        follow_loader(loader, number, progress)
    progress.watch(loop, loaders, [*list_with_nested(loop.by_hand), *schedulers])


def _in_order(objects: Sequence[Any], prepared: Mapping[int, Any]) -> Any:
    result = tuple(prepared.get(id(value), value) for value in objects)
    return result if len(result) != 1 else result[0]


def open_loop(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    plan: str | AnyPlan,
    batch_dim: BatchDim | None = None,
    progress: LoopObserver | None = None,
) -> TrainingLoop:
    """Return the loop of a script that calls these models and optimizers; collective.

    Args:
        models: the models, all that the optimizers train among them.
        optimizers: the optimizers, on parameters of these.
        plan: the plan; a line, or a plan read from a file.
        batch_dim: where tensors have the samples, as of :func:`prepare`.
        progress: what follows the loop's steps, for its checkpoints.
    """
    session = current_session()
    with generators_kept():
        world = session.join_world()
        if world.size > 1:
            os.environ[RANK_VARIABLE] = str(world.rank)
        plan = read_plan(plan, world, session.is_alone)
        loop = TrainingLoop(world, models, optimizers, plan, batch_dim, progress)
    if (
        progress is not None
        and world.rank == 0
        and all(isinstance(optimizer, ScriptUpdates) for optimizer in optimizers)
    ):
        say_at_once(
            "no checkpoints are saved: they are taken after an optimizer's step(), and prepare() was given none"
        )
    loop.runner.audit_mode, loop.runner.noise_mode = session.audit, session.noise
    loop.runner.recorder = session.recorder if not session.loops else None
    session.hold(loops=[loop])
    _agree_on_random_numbers(world)
    share_saves(world)
    record_functions()
    keep_metrics_whole()
    torch.compiler.set_stance("force_eager")  # what the script has compiled would not be recorded
    return loop


def _refuse_containers(objects: Sequence[Any]) -> None:
    """Refuse containers, of which it would depend on the plan whether what is in them is prepared."""
    if (container := next((o for o in objects if isinstance(o, list | tuple | dict | set)), None)) is not None:
        raise PolylaneError(
            f"prepare() was given a {type(container).__name__}: give what is in it one by one, prepare(*loaders), and "
            "take as many results"
        )


def _refuse_unusable(models: Sequence[nn.Module]) -> None:
    """Refuse no model at all, and one that was prepared before."""
    if not models:
        raise PolylaneError("prepare() was given no model: give it those that the loop trains, with their optimizers")
    for model in models:
        if type(model) is PreparedModel or any(guard_of(parameter) is not None for parameter in model.parameters()):
            raise PolylaneError(
                f"prepare() was given a {model.__class__.__name__} that it has prepared before: call it once, before "
                "the loop, with all that the loop trains"
            )


def _refuse_distributed(models: Sequence[nn.Module], loaders: Sequence[DataLoader[Any]]) -> None:
    for model in models:
        refuse_unusable_modules(model)
    for loader in loaders:
        samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
        if any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers):
            raise PolylaneError(
                "a loader has a DistributedSampler, which gives every worker other samples, and the plan divides "
                "batches itself: make the loader as for one device, with shuffle=True"
            )


def _agree_on_random_numbers(world: World) -> None:
    """Give every worker the generator states of rank 0, so that scripts without a seed shuffle and draw alike."""
    if world.size > 1:
        restore_generators(world.all_gather_object(collect_generators(world.accelerator))[0], world.accelerator)


def epochs(values: Iterable[T]) -> Iterator[T]:
    """Yield the epochs of a training loop; a resumed run passes over those that are finished.

    A script that saves checkpoints (``polylane run --save-every``) and makes more than one pass through its data writes
    ``for epoch in polylane.epochs(range(10)):``. Elsewhere the values are yielded as they are.

    Args:
        values: the epochs, such as ``range(10)``, the same whenever the script is started.

    Yields:
        The values; of a resumed run those that are left.

    Examples:
        >>> import polylane
        >>> for epoch in polylane.epochs(range(2)):
        ...     print("epoch", epoch)
        epoch 0
        epoch 1
    """
    return current_session().progress.epochs(values)


def resumed(**values: Any) -> SimpleNamespace:
    """Return variables of the script that its checkpoints hold, with the values that they have at first.

    ``kept = polylane.resumed(best=0.0)`` is read and written as ``kept.best``. Where a resumed run goes on, the
    variables have the values that they had there.

    Args:
        values: numbers, texts, small tensors and containers of these; or objects with a ``state_dict``. Others are
            refused when the first checkpoint is saved.

    Returns:
        An object with these variables as attributes, to be read and assigned.

    Examples:
        >>> import polylane
        >>> kept = polylane.resumed(best=0.0)
        >>> for accuracy in [0.7, 0.9, 0.8]:
        ...     kept.best = max(kept.best, accuracy)
        >>> kept.best
        0.9
    """
    return current_session().progress.remember(values)
