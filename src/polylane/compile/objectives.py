"""Objectives of a training: each a loss with the optimizer that minimizes it and its scheduler; parameters by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from polylane.compile.optimizer_sequence import (
    JoinedFactory,
    SchedulerSequence,
    as_given,
    optimizers_in,
    schedulers_in,
)
from polylane.compile.unusable_modules import refuse_unusable_settings
from polylane.errors import PolylaneError
from polylane.graph.capture.export import Loss
from polylane.graph.capture.output_request import Function, OutputRequest
from polylane.graph.capture.python.log_statements import LossLog
from polylane.graph.python_state.compiler import without_compiler

# Fills the tensors that a module itself owns, for a model that was built on the meta device.
Init = Callable[[nn.Module], None]


Parameters = list[tuple[str, nn.Parameter]]


OptimizerFactory = Callable[[Parameters], torch.optim.Optimizer]


SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class Objective:
    """One loss and the optimizer that minimizes it; most trainings have one, a GAN has two.

    Attributes:
        name: name by which steps and evaluations select it.
        loss: the user's loss, a function or module of (model, batch).
        optimizer: factory from (name, parameter) pairs to an optimizer.
        scheduler: factory from that optimizer to a scheduler; None without one.
        log: lines of the user's loss that only note something, and that ``loss`` is without; None: it has none.
        metrics: the user's function of (model, batch), whose results every evaluation has; None without one.
    """

    name: str
    loss: Loss
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    log: LossLog | None = None
    metrics: Function | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", without_compiler(self.loss))
        # An optimizer object, or a list of them, becomes a factory once the model's names are known.
        if not isinstance(self.optimizer, JoinedFactory | torch.optim.Optimizer | list | tuple):
            object.__setattr__(self, "optimizer", JoinedFactory(self.optimizer))

    @property
    def outputs(self) -> OutputRequest | None:
        """What an evaluation computes beside the loss; None: nothing."""
        return None if self.metrics is None else OutputRequest("metrics", self.metrics)

    @property
    def given_loss(self) -> Loss:
        """The user's own loss, with the lines that only note something."""
        return self.loss if self.log is None else self.log.loss

    @property
    def given_optimizer(self) -> Any:
        """The user's own factory of the optimizer."""
        return self.optimizer.factory if isinstance(self.optimizer, JoinedFactory) else self.optimizer

    @property
    def factories(self) -> list[Any]:
        """What builds optimizer and scheduler, and what an optimizer object calls: roots of the code that these run."""
        given_optimizer = self.given_optimizer
        roots, optimizer = [given_optimizer], getattr(given_optimizer, "optimizer", given_optimizer)
        tables: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        for single in optimizers_in(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else ():
            roots.append(single.step)
            # A class of the user's may not have them.
            tables += [getattr(single, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
        roots += [hook for table in tables for hook in table.values()]
        return [*roots, *([self.scheduler] if self.scheduler else [])]


def named_parameters(model: nn.Module, losses: Collection[Any]) -> Parameters:
    """Return all parameters by the model's own names, each once; those of a loss module under "loss."."""
    named = list(model.named_parameters())
    for loss in losses:
        if isinstance(loss, nn.Module):
            named += [(f"loss.{name}", parameter) for name, parameter in loss.named_parameters()]
    return named


def find_held_names(parameters: Parameters, factory: OptimizerFactory) -> tuple[str, ...]:
    """Return the names of the parameters that an optimizer factory puts into its groups, in the model's order.

    Those that require no gradient now are among them: which of them is trained, each step's gradients decide.

    Raises:
        PolylaneError: the factory fails, or takes a parameter that is not the model's; or there is nothing to train.
    """
    names = {id(parameter): name for name, parameter in parameters}
    try:
        optimizer = factory(list(parameters))
    except Exception as error:
        refuse_untrainable(parameters)  # torch's optimizers raise on an empty list: say rather why it is empty
        raise PolylaneError(f"optimizer(parameters) fails: {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PolylaneError(
            f"optimizer(parameters) must return a torch.optim.Optimizer, or a list of them, not a "
            f"{type(optimizer).__name__}"
        )
    for inner_optimizer in optimizers_in(optimizer):
        _refuse_closure(inner_optimizer)
    group_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in group_parameters):
        raise PolylaneError("optimizer(parameters) must optimize the parameters it is given, not copies of them")
    refuse_untrainable(parameters)
    if not any(parameter.requires_grad for parameter in group_parameters):
        raise PolylaneError("the optimizer takes no parameter that requires a gradient, so that it would train nothing")
    held_names = {names[id(parameter)] for parameter in group_parameters}
    return tuple(name for name, _ in parameters if name in held_names)


def trainable_names(parameters: Parameters, held_names: Collection[str]) -> list[str]:
    """Return those of an optimizer's parameters that require a gradient now; others take part as constants."""
    names = frozenset(held_names)
    return [name for name, parameter in parameters if parameter.requires_grad and name in names]


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that evaluates the loss itself, or that cannot step outside of another loss.

    Raises:
        PolylaneError: its ``step`` needs a closure, or a group has ``differentiable=True``.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PolylaneError(
            "torch.optim.LBFGS evaluates the loss several times a step, which no plan can do: take another optimizer"
        )
    # An instance's own step may be a wrapper of torch's schedulers: the class has the signature.
    required = [p for p in inspect.signature(type(optimizer).step).parameters.values() if _is_required(p)]
    if len(required) > 1:
        raise PolylaneError(
            f"{name}.step({required[1].name}) needs a closure that evaluates the loss, which no plan can do within the "
            "optimizer: take an optimizer whose step() uses the gradients that are there"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise PolylaneError(
            f"{name}(differentiable=True) steps inside of another loss, on tensors that are no leaves: leave it out"
        )


def build_scheduler(factory: SchedulerFactory | None, optimizer: torch.optim.Optimizer) -> Any:
    """Return the user's learning-rate scheduler for an optimizer; None without a factory, or if that returns None.

    A list of optimizers is given as the list that it was; of a list of schedulers each steps in turn.

    Raises:
        PolylaneError: the factory returns something without a ``step()``, or the scheduler of another optimizer.
    """
    if factory is None:
        return None
    result = factory(as_given(optimizer))
    several = isinstance(result, list | tuple)
    for scheduler in result if several else [] if result is None else [result]:
        if not callable(getattr(scheduler, "step", None)):
            raise PolylaneError(
                f"scheduler(optimizer) must return a learning-rate scheduler, with a step(), or a list of them, not a "
                f"{type(scheduler).__name__}: torch.optim.lr_scheduler.LambdaLR makes one of a function of the step"
            )
        target = getattr(scheduler, "optimizer", None)
        if isinstance(target, torch.optim.Optimizer) and not any(target is part for part in optimizers_in(optimizer)):
            raise PolylaneError(
                f"scheduler(optimizer) must return a scheduler of the optimizer that it is given, and this "
                f"{type(scheduler).__name__} sets the rates of another one"
            )
    return SchedulerSequence(result) if several else result


def needs_metric(scheduler: Any) -> bool:
    """Return whether a scheduler's ``step`` takes a metric, as that of ReduceLROnPlateau: it gets the step's loss."""
    if scheduler is None or isinstance(scheduler, SchedulerSequence):
        return any(map(needs_metric, schedulers_in(scheduler)))
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(_is_required(parameter) for parameter in parameters)


def _is_required(parameter: inspect.Parameter) -> bool:
    positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return positional and parameter.default is parameter.empty


def refuse_untrainable(parameters: Parameters) -> None:
    """Refuse parameters of which none can be trained.

    Raises:
        PolylaneError: no parameter requires a gradient, or none has any elements.
    """
    if not parameters:
        raise PolylaneError("the model has no parameters, so that there is nothing to train: see what model() returns")
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise PolylaneError(
            "no parameter of the model requires a gradient, so that there is nothing to train: unfreeze some"
        )
    if not any(parameter.requires_grad and parameter.numel() for _, parameter in parameters):
        raise PolylaneError(
            "no parameter of the model that requires a gradient has any elements, so that there is nothing to train: "
            "give it a width"
        )


def build_objectives(
    loss: Loss | Mapping[str, Loss],
    optimizer: OptimizerFactory | Mapping[str, OptimizerFactory],
    scheduler: SchedulerFactory | Mapping[str, SchedulerFactory] | None,
    metrics: Function | None = None,
) -> dict[str, Objective]:
    """Build one objective, or one for each name of a mapping; metrics belong to the first.

    Raises:
        PolylaneError: the mappings do not have the same names, or torch is set so that nothing can be trained.
    """
    refuse_unusable_settings()
    if not isinstance(loss, Mapping):
        if isinstance(optimizer, Mapping) or isinstance(scheduler, Mapping):
            raise PolylaneError(
                "one loss takes one optimizer and one scheduler: give a mapping of losses, or no mapping at all"
            )
        return {"loss": Objective("loss", loss, optimizer, scheduler, metrics=metrics)}
    if not isinstance(optimizer, Mapping) or set(loss) != set(optimizer):
        raise PolylaneError(f"losses named {sorted(loss)} take a mapping of optimizers with the same names")
    # Parameters of a loss module are named "loss.": with two such modules the names would not be unique.
    shared = [
        name for name, term in loss.items() if isinstance(term, nn.Module) and next(term.parameters(), None) is not None
    ]
    if len(shared) > 1:
        raise PolylaneError(f"losses {', '.join(sorted(shared))} both have parameters: move them into the model")
    schedulers = scheduler if isinstance(scheduler, Mapping) else dict.fromkeys(loss, scheduler)
    metrics_of = {next(iter(loss), ""): metrics}
    return {
        name: Objective(name, loss[name], optimizer[name], schedulers.get(name), metrics=metrics_of.get(name))
        for name in loss
    }


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's ``step`` evaluates the loss itself, by a closure that it must be given."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    return not type(optimizer).__module__.startswith("torch.") and _steps_by_closure(optimizer)


def _steps_by_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a copy of an optimizer, on small parameters, raises without a closure, and calls one with it."""
    sources = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    calls = list[Tensor]()

    def step(has_closure: bool) -> bool:
        small = [nn.Parameter(source.new_zeros((1,) * source.dim())) for source in sources]

        def evaluate() -> Tensor:
            for parameter in small:
                parameter.grad = torch.zeros_like(parameter)
            calls.append(torch.zeros(()))
            return calls[-1]

        try:
            copied: Any = object.__new__(type(optimizer))  # torch copies an optimizer without a subclass's attributes
            memo: dict[int, Any] = {id(source): new for source, new in zip(sources, small, strict=True)}
            vars(copied).update(copy.deepcopy(vars(optimizer), memo))
            evaluate()
            copied.step(*([evaluate] if has_closure else []))
        except Exception:  # a user's optimizer on parameters that it was not written for: whatever it raises
            return False
        return True

    return not step(False) and step(True) and len(calls) > 2
