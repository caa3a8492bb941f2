"""One pass of torch.export over ``loss(model, batch)``, and whose line it was that could not be captured."""

from __future__ import annotations

import builtins
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
import torch.utils._traceback
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config

from polylane.errors import PolylaneError
from polylane.graph.batch import Rebuild, is_sampled, sample_count
from polylane.graph.capture.leaves import CaptureRun
from polylane.graph.capture.python_operators import functions_kept
from polylane.graph.python_state.random_generators import generator_states
from polylane.graph.python_state.random_generators import restore_generators as restore_states
from polylane.graph.python_state.side_effects import python_names_of, torch_object_ids
from polylane.graph.python_state.state_restore import snapshot_names
from polylane.graph.python_state.user_lines import is_users
from polylane.recipe import Mean

# Filled in by torch's own config machinery, which no type checker sees.
_SYMBOLIC: Any = _config

Loss = Callable[[nn.Module, Any], Any]


class ModelWithLoss(nn.Module):
    """Model and loss as one module over flat leaves, so that any form of batch and output can be captured."""

    def __init__(self, model: nn.Module, loss: Loss, rebuild: Rebuild) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss, nn.Module):
            self.loss = loss  # its buffers (class weights, say) are captured too
        self.given_loss = loss
        self._rebuild = rebuild
        self.tracing = CaptureRun()
        self.mean = True

    def forward(self, *leaves: Any) -> tuple[Tensor, ...]:
        self.tracing.samples = sample_count(leaves)
        self.tracing.calls.clear()
        result = self.given_loss(self.model, self._rebuild(leaves))
        if isinstance(result, Mean):
            self.mean = False
            if isinstance(result.total, Tensor) and result.total.dim() == 0:
                _refuse_complex(result.total, "polylane.Mean(total, count) takes")
                count = result.count
                if not isinstance(count, Tensor):  # a number of samples stays one under capture, not the example's
                    return result.total, result.total.detach().new_ones(()) * count
                return result.total, count.detach().to(result.total.dtype)
            raise BadLoss("polylane.Mean(total, count) takes scalars: sum the losses of the elements that count")
        self.mean = True
        if not isinstance(result, Tensor) or result.dim() > 0:
            shaped = isinstance(result, Tensor)
            form = f"a tensor of shape {tuple(result.shape)}" if shaped else f"a {type(result).__name__}"
            raise BadLoss(f"loss(model, batch) must return a scalar tensor or polylane.Mean(total, count), not {form}")
        _refuse_complex(result, "loss(model, batch) must return")
        return (result,)

    @property
    def loss_function(self) -> Any:
        """What the user gave as the loss."""
        return self.given_loss.forward if isinstance(self.given_loss, nn.Module) else self.given_loss

    @property
    def tied(self) -> dict[str, str]:
        """Second and later names of a tensor -> its first."""
        first: dict[int, str] = {}
        tied = {}
        for name, tensor in self.named_tensors("parameters") + self.named_tensors("buffers"):
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
        return tied

    def named_tensors(self, what: str) -> list[tuple[str, Tensor]]:
        """All "parameters" or "buffers" by the user's own names; those of a loss that is a module begin with "loss"."""
        every: Callable[..., Any] = getattr(self, f"named_{what}")
        return [(name.removeprefix("model."), tensor) for name, tensor in every(remove_duplicate=False)]


class BadLoss(PolylaneError):
    """The loss returns something else than a loss."""


def _refuse_complex(loss: Tensor, what: str) -> None:
    """Of complex numbers none is the smallest.

    Raises:
        BadLoss: it is one.
    """
    if loss.is_complex():
        raise BadLoss(f"{what} a real number, not a complex one ({loss.dtype}): take .abs() or .real of it")


class NotCaptured(Exception):
    """Export failed: in which module, at which of the user's lines, and why.

    Attributes:
        path: the innermost module whose forward was running; None when none was.
        line: "file:line", or "".
        reason: one sentence.
    """

    def __init__(self, path: str | None, line: str, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path, self.line, self.reason = path, line, reason

    @classmethod
    def of(cls, whole: ModelWithLoss, error: BaseException) -> NotCaptured:
        """Whose fault ``error`` is: the innermost module, and the innermost line of the user's, in its traceback."""
        paths = {id(module): path for path, module in whole.model.named_modules()}
        path, line = None, ""
        for frame, number in traceback.walk_tb(error.__traceback__):
            first = frame.f_code.co_varnames[:1]  # whatever the user calls it
            module = frame.f_locals.get(first[0]) if first else None
            if frame.f_code.co_name == "forward" and id(module) in paths:
                path = paths[id(module)]
            if is_users(frame.f_code.co_filename):
                line = f"{frame.f_code.co_filename}:{number}"
        return cls(path, line, reason_of(error))


def export(whole: ModelWithLoss, leaves: Sequence[Any]) -> torch.export.ExportedProgram:
    """Capture ``whole`` with the batch dimension left open.

    Raises:
        NotCaptured: naming the innermost module at fault.
    """
    samples = sample_count(leaves)
    dynamic = tuple({0: torch.export.Dim.AUTO} if is_sampled(leaf, samples) else None for leaf in leaves)
    try:
        # Oblivious sizes: without it a graph would hold for two samples or more, and silently broadcast one.
        with (
            _SYMBOLIC.patch(backed_size_oblivious=True),
            functions_kept(),
            _caches_off(whole.model),
            _lines_kept(),
            _lengths_open(),
            _checkpoints_inlined(whole.tracing),
            _distributions_unchecked(),
            _quiet(),
            torch.enable_grad(),
        ):
            return torch.export.export(
                whole,
                tuple(leaves),
                dynamic_shapes={"leaves": dynamic},
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except BadLoss:
        raise
    except Exception as error:
        raise NotCaptured.of(whole, error) from error


@contextmanager
def _caches_off(model: nn.Module) -> Iterator[None]:
    """Generation caches (a config's ``use_cache``) do not belong to training and only get in a graph's way."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        for config in on:
            config.use_cache = True


@contextmanager
def _distributions_unchecked() -> Iterator[None]:
    """torch.distributions looks at its arguments' values, which a graph has none of; the self-check runs with them."""
    base: Any = getattr(sys.modules.get("torch.distributions.distribution"), "Distribution", None)
    before = getattr(base, "_validate_args", None)
    if base is not None:
        base.set_default_validate_args(False)
    try:
        yield
    finally:
        if base is not None:
            base.set_default_validate_args(before)


@contextmanager
def _lines_kept() -> Iterator[None]:
    """Let nodes remember every line of the user's in the loss: torch keeps those of functions named "forward" alone."""
    tracer: Any = torch.fx.proxy.TracerBase
    stacks: Any = torch.utils._traceback
    original, read = tracer._filter_traceback_frames, stacks._extract_symbolized_tb

    def of_the_user(_: Any, stack: traceback.StackSummary) -> traceback.StackSummary:
        frames = list(stack)
        start = max((i for i, frame in enumerate(frames) if frame.filename == __file__), default=-1)
        return traceback.StackSummary.from_list([frame for frame in frames[start + 1 :] if is_users(frame.filename)])

    def unread(frames: Sequence[Any], skip: int) -> traceback.StackSummary:
        """A stack whose lines are read from their files when they are asked for: torch reads those of all frames."""
        every = [(frame["filename"], frame["line"], frame["name"]) for frame in reversed(frames[skip:])]
        return traceback.StackSummary.from_list([traceback.FrameSummary(*each, lookup_line=False) for each in every])

    tracer._filter_traceback_frames, stacks._extract_symbolized_tb = of_the_user, unread
    try:
        yield
    finally:
        tracer._filter_traceback_frames, stacks._extract_symbolized_tb = original, read


@contextmanager
def _lengths_open() -> Iterator[None]:
    """Let ``len(tensor)`` be a size that follows the samples: Python's own would fix it to the example's."""
    length = builtins.len

    def open_length(of: Any) -> Any:
        return of.shape[0] if isinstance(of, FakeTensor) and of.dim() else length(of)

    builtins.len = open_length
    try:
        yield
    finally:
        builtins.len = length


@contextmanager
def _checkpoints_inlined(tracing: CaptureRun) -> Iterator[None]:
    """Let torch.utils.checkpoint be what it runs, gradients and all, and remember the lines that asked for it."""
    own: Any = torch.utils.checkpoint
    reentrant, other = own.CheckpointFunction, own._checkpoint_without_reentrant_generator

    class Inlined:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            tracing.recomputed_lines.add(_users_line())
            return function(*args)

    def noted(*args: Any, **kwargs: Any) -> Any:
        tracing.recomputed_lines.add(_users_line())
        return other(*args, **kwargs)

    own.CheckpointFunction, own._checkpoint_without_reentrant_generator = Inlined, noted
    try:
        yield
    finally:
        own.CheckpointFunction, own._checkpoint_without_reentrant_generator = reentrant, other


def _users_line() -> str:
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


_TALKATIVE = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch.fx")


@contextmanager
def _quiet() -> Iterator[None]:
    """Export prints and logs its half-finished graph when it fails: here that is a normal event."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    with redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def reason_of(error: BaseException) -> str:
    """Why something failed, on one line."""
    name = type(error).__name__
    if name in ("GuardOnDataDependentSymNode", "UserError") and "data-dependent" in str(error):
        return "which way it goes, or how much it computes, depends on the data"
    text = str(error).strip().splitlines() or [""]
    return f"{name}: {text[0]}" if text[0] else name


def format_line(line: str) -> str:
    """A source line as the end of a sentence."""
    return f" ({line})" if line else ""


def snapshot_model(model: nn.Module, *losses: Any) -> Callable[[], None]:
    """Remember all that belongs to a model, and all random states; the result restores it.

    Parameters, buffers, gradients, train flags, every attribute of every module with what is in it, and what else the
    user's Python keeps: globals, what functions close over (see :mod:`polylane.graph.python_state.state`).

    Args:
        model: the model, or a :class:`ModelWithLoss`, whose loss is looked at as well.
        losses: others.
    """
    tensors = snapshot_tensors(model)
    losses = (*losses, model.given_loss) if isinstance(model, ModelWithLoss) else losses
    state = snapshot_names(python_names_of(model, *losses), torch_object_ids(model, *losses))
    modules = [(m, dict(m.__dict__)) for m in model.modules()]
    random = generator_states()

    def restore() -> None:
        for module, attributes in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        state()
        tensors()
        restore_states(random)

    return restore


@contextmanager
def python_kept(model: nn.Module, *losses: Any) -> Iterator[None]:
    """Whatever runs meanwhile, what the user's Python keeps, and all random states, are afterwards as they were."""
    losses = (*losses, model.given_loss) if isinstance(model, ModelWithLoss) else losses
    state, random = (
        snapshot_names(python_names_of(model, *losses), torch_object_ids(model, *losses)),
        generator_states(),
    )
    try:
        yield
    finally:
        state()
        restore_states(random)


def snapshot_tensors(model: nn.Module) -> Callable[[], None]:
    """Remember parameters, buffers, gradients, and torch's random state; the result restores them."""
    tensors = [(t, t.detach().clone(), t.grad, t.is_leaf) for t in (*model.parameters(), *model.buffers())]
    inner = ("_parameters", "_buffers", "_modules")
    dicts = [(m.__dict__[name], dict(m.__dict__[name])) for m in model.modules() for name in inner]
    random = torch.get_rng_state()
    devices = {t.device for t, *_ in tensors if t.device.type == "cuda"}
    device_random = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        for own, content in dicts:
            own.clear()
            own.update(content)
        with torch.no_grad():
            for tensor, value, grad, leaf in tensors:
                if leaf and not tensor.is_leaf:  # a write left its gradients behind
                    tensor.detach_()
                tensor.data.copy_(value)
                tensor.grad = grad
        torch.set_rng_state(random)
        for device, state in device_random:
            torch.cuda.set_rng_state(state, device)

    return restore
