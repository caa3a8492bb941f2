"""One pass of torch.export over ``loss(model, batch)``, and the user's line at fault where it fails."""

from __future__ import annotations

import builtins
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config

from polylane.errors import PolylaneError, read_text
from polylane.graph.batch import Rebuild, is_sampled, sample_count
from polylane.graph.capture.gradients.calls import gradient_calls_kept
from polylane.graph.capture.known_values import KnownValues
from polylane.graph.capture.output_request import BadOutputs, LossWithOutputs, OutputRequest, stand_in_loss
from polylane.graph.capture.python.asked_numbers import AskedNumbers
from polylane.graph.capture.python.checkpoints import checkpoints_inlined
from polylane.graph.capture.python.export_repairs import UsersFrames, exports_repaired
from polylane.graph.capture.python.muted_prints import prints_muted
from polylane.graph.capture.python.packed_sequences import packed_sequences_padded
from polylane.graph.capture.python.python_operators import functions_kept
from polylane.graph.capture.python.raising_branches import AbsentValues
from polylane.graph.capture.python.stray_tensors import references_replaced
from polylane.graph.capture.questions.capture_run import CaptureRun
from polylane.graph.capture.questions.tape import sizes_answered
from polylane.graph.capture.reassigned_buffers import reassignments_written
from polylane.graph.nodes.user_lines import NotCaptured
from polylane.graph.python_state.compiler import compiler_off
from polylane.graph.python_state.gradient_hooks import GradientHooks
from polylane.graph.python_state.random_generators import generator_states, restore_generators
from polylane.graph.python_state.side_effects import python_names_of, torch_object_ids
from polylane.graph.python_state.state_snapshots import snapshot_names
from polylane.graph.quiet_tracing import quiet
from polylane.graph.readings.asked_draws import StepDraws
from polylane.recipe import Mean

# Filled in by torch's own config machinery, which no type checker sees.
_SYMBOLIC: Any = _config

Loss = Callable[[nn.Module, Any], Any]


class ModelWithLoss(nn.Module):
    """Model and loss as one module over flat leaves, so that any structure of batch and output can be captured.

    Args:
        model: the user's model, which the loss calls.
        loss: the user's loss; not called where ``request`` has none.
        rebuild: makes a batch of flat leaves.
        draws: numbers of the step for which it is captured; None: of no step.
        request: what is asked for beside the loss; None: nothing.

    Attributes:
        output_form: what the outputs of the last run are that were asked for; None before, and where there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        rebuild: Rebuild,
        draws: StepDraws | None = None,
        request: OutputRequest | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss, nn.Module):
            self.loss = loss  # its buffers (class weights, say) are captured too
        self.given_loss, self.request = loss, request
        self.output_form: Any = None
        self.call = "loss(model, batch)"  # what is under way, for messages
        self.rebuild = rebuild
        self.tracing = CaptureRun(draws=draws)
        self.mean, self.is_undivided = True, False
        self.check_device: torch.device | None = None  # of the captured code's self-check; None: where the model is
        self.carried: dict[int, Any] = {}  # leaves that are no tensors and are not read: no inputs of an export

    def forward(self, *leaves: Any) -> tuple[Tensor, ...]:
        self.tracing.samples = sample_count(leaves)
        self.tracing.calls.clear()
        _share_sample_count(leaves, self.tracing.sampled)
        exporting = torch.compiler.is_exporting()
        inputs = [self.carried.get(i, leaf) for i, leaf in enumerate(leaves)] if exporting else leaves
        absent = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)
        eagerly = AbsentValues() if absent else self.tracing.drawn_alike()
        with compiler_off(), self._exporting(leaves) if exporting else eagerly:
            result = self._compute(self.rebuild(inputs))
        outputs: tuple[Tensor, ...] = ()
        if isinstance(result, LossWithOutputs):
            self.is_undivided = result.is_undivided
            result, outputs = result.loss, tuple(output.detach() for output in result.outputs)
        self.mean = not isinstance(result, Mean)
        if isinstance(result, Mean):
            total, count = result.total, result.count
            if not isinstance(total, Tensor) or total.dim() > 0:
                raise BadLoss("polylane.Mean(total, count) takes scalars: sum the losses of the elements that count")
            _refuse_complex(total, "polylane.Mean(total, count) takes")
            if not isinstance(count, Tensor):  # the product keeps a symbolic size symbolic under export
                return total, total.detach().new_ones(()) * count, *outputs
            return total, count.detach().to(total.dtype), *outputs
        if not isinstance(result, Tensor) or result.dim() > 0:
            shaped = isinstance(result, Tensor)
            form = f"a tensor of shape {tuple(result.shape)}" if shaped else f"a {type(result).__name__}"
            raise BadLoss(f"loss(model, batch) must return a scalar tensor or polylane.Mean(total, count), not {form}")
        _refuse_complex(result, "loss(model, batch) must return")
        return (result, *outputs)

    def _compute(self, batch: Any) -> Any:
        """Return what the loss returns for a batch, with the outputs that are asked for beside it."""
        self.call = "loss(model, batch)"
        loss = self.given_loss(self.model, batch) if self.request is None or self.request.has_loss else None
        if self.request is None:
            return loss
        self.call = self.request.call
        outputs, self.output_form = self.request.compute(self.model, batch)
        return LossWithOutputs(stand_in_loss(outputs) if loss is None else loss, outputs)

    @contextmanager
    def _exporting(self, leaves: Sequence[Any]) -> Iterator[None]:
        """Context manager: what export leaves undone, while it has its own tensors in place of the parameters."""
        present = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        stand_ins = {id(self.tracing.tensors[name]): tensor for name, tensor in present.items()}
        numbers = AskedNumbers()
        with (
            references_replaced(self, stand_ins),
            numbers.branches_checked(),
            KnownValues(self.tracing.tape, leaves, numbers),
            reassignments_written(self),
        ):
            yield

    @property
    def loss_function(self) -> Any:
        """The function of the user's that is under way: the loss, or what asks for outputs."""
        if self.request is not None and self.call == self.request.call:
            return self.request.function
        return self.given_loss.forward if isinstance(self.given_loss, nn.Module) else self.given_loss

    @property
    def functions(self) -> tuple[Any, ...]:
        """What a run calls of the user's beside the model: the loss, and what asks for outputs."""
        return (self.given_loss,) if self.request is None else (self.given_loss, self.request.function)

    @property
    def tied(self) -> dict[str, str]:
        """Second and later names of a tensor -> its first name."""
        first_names: dict[int, str] = {}
        tied = {}
        for name, tensor in self.named_tensors("parameters") + self.named_tensors("buffers"):
            if first_names.setdefault(id(tensor), name) != name:
                tied[name] = first_names[id(tensor)]
        return tied

    def named_tensors(self, kind: str) -> list[tuple[str, Tensor]]:
        """Return all "parameters" or "buffers" by the user's names; those of a loss module begin with "loss"."""
        method: Callable[..., Any] = getattr(self, f"named_{kind}")
        return [(name.removeprefix("model."), tensor) for name, tensor in method(remove_duplicate=False)]


def _share_sample_count(leaves: Sequence[Any], sampled: Sequence[int]) -> None:
    """Tell export that all divided leaves have equally many samples: it names the length of each by itself.

    Without it, what is viewed by the length of one leaf and read with another's ("[batch, -1]" of an attention mask)
    has a size that is only equal to the number of tokens as long as both lengths are.

    Args:
        leaves: flat leaves under export, whose lengths are symbolic.
        sampled: indices of the leaves that are divided with the samples.
    """
    for index, next_index in itertools.pairwise(sampled):
        # The comparison itself is what export notes; a loss on leaves of other lengths is not this one.
        assert leaves[index].shape[0] == leaves[next_index].shape[0]


class BadLoss(PolylaneError):
    """The loss returns something else than a loss."""


def _refuse_complex(loss: Tensor, subject: str) -> None:
    """Check that a loss is real: complex numbers have no order, so that none is the smallest.

    Raises:
        BadLoss: the loss is a complex number.
    """
    if loss.is_complex():
        raise BadLoss(f"{subject} a real number, not a complex one ({loss.dtype}): take .abs() or .real of it")


def export(
    module: ModelWithLoss, leaves: Sequence[Any], opened: Collection[tuple[int, int]] = ()
) -> torch.export.ExportedProgram:
    """Capture ``module`` with the batch dimension left open.

    Args:
        module: model and loss as one module.
        leaves: flat leaves of an example batch.
        opened: further dimensions to be left open where the model allows it, as (leaf, dimension).

    Raises:
        NotCaptured: export fails; names the innermost module at fault.
    """
    samples = sample_count(leaves)
    module.tracing.tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # AUTO: a size that the model fixes becomes a constant instead of an error.
    auto, further = torch.export.Dim.AUTO, [{dim for at, dim in opened if at == i} for i in range(len(leaves))]
    sampled = [is_sampled(leaf, samples) for leaf in leaves]
    dims = [{0, *indices} if is_divided else indices for is_divided, indices in zip(sampled, further, strict=True)]
    dynamic = tuple(dict.fromkeys(indices, auto) or None for indices in dims)
    module.tracing.sampled = tuple(itertools.compress(range(len(leaves)), sampled))
    try:
        # Oblivious sizes: without it a graph would hold for two samples or more, and silently broadcast one.
        with (
            _SYMBOLIC.patch(backed_size_oblivious=True),
            functions_kept(),
            gradient_calls_kept(),
            exports_repaired(),
            packed_sequences_padded(),
            sizes_answered(module.tracing.tape),
            _caches_off(module.model),
            _lines_kept(),
            patch.object(builtins, "len", _open_length),
            checkpoints_inlined(),
            _distributions_unchecked(),
            quiet(),
            torch.enable_grad(),
        ):
            return torch.export.export(
                module,
                tuple(None if i in module.carried else leaf for i, leaf in enumerate(leaves)),
                dynamic_shapes={"leaves": dynamic},
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except (BadLoss, BadOutputs):  # the user's to mend, and no matter of export
        raise
    except Exception as error:
        raise NotCaptured.of(module.model, error) from error


@contextmanager
def _caches_off(model: nn.Module) -> Iterator[None]:
    """Context manager: switch generation caches (``use_cache``) off, which only get in a graph's way in training."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    # Not by a patch, which would delete an attribute that the object does not hold itself (a property, say).
    for config in on:
        config.use_cache = False
    try:
        yield
    finally:
        for config in on:
            config.use_cache = True


def _distributions_unchecked() -> AbstractContextManager[Any]:
    """Return a context manager: stop torch.distributions from checking argument values; under export there are none."""
    base: Any = getattr(sys.modules.get("torch.distributions.distribution"), "Distribution", None)
    return patch.object(base, "_validate_args", False) if base is not None else nullcontext()


@contextmanager
def _lines_kept() -> Iterator[None]:
    """Context manager: keep all of the user's lines in stack traces; torch keeps those of "forward" functions only."""
    proxies: Any = torch.fx.proxy
    with (
        patch.object(proxies.TracerBase, "_filter_traceback_frames", lambda _, stack: stack),
        patch.object(proxies, "CapturedTraceback", UsersFrames(__file__)),
    ):
        yield


_LENGTH = len


def _open_length(of: Any) -> Any:
    """``len``, but for tensors a symbolic size; Python's own would fix it to the example's."""
    return of.shape[0] if isinstance(of, FakeTensor) and of.dim() else _LENGTH(of)


def why_data_needed(error: BaseException) -> str:
    """Return what about the data an operator wanted to know that ran on the meta device, where there is none; or ""."""
    text = read_text(error).partition("\n")[0].lower()
    if not isinstance(error, NotImplementedError | RuntimeError | TypeError) or "meta" not in text:
        return ""
    by_size = ("nonzero", "masked_select", "unique", "bincount", "repeat_interleave", "histc")
    name = next((name for name in by_size if name in text), None)
    if name is None:
        return "a value of a tensor"
    return "how many elements a boolean mask chooses" if name == "nonzero" else f"the size of what {name} returns"


def snapshot_model(model: nn.Module, *losses: Any) -> Callable[[], None]:
    """Record all that belongs to a model, and all random states; the returned function restores it.

    Parameters, buffers, gradients, train flags, every attribute of every module with its contents, and other state of
    the user's Python: globals, closures (see :mod:`polylane.graph.python_state.state`).

    Args:
        model: the model, or a :class:`ModelWithLoss`, whose loss is recorded as well.
        losses: further losses whose Python state is recorded.
    """
    tensors, state, random = snapshot_tensors(model), _snapshot_python(model, losses), generator_states()
    modules = [(m, dict(m.__dict__)) for m in model.modules()]

    # In this order: attributes, then what their values contain, then the values of tensors.
    def restore() -> None:
        for module, attributes in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        state()
        tensors()
        restore_generators(random)

    return restore


@contextmanager
def model_restored(model: nn.Module, *losses: Any) -> Iterator[Callable[[], None]]:
    """Context manager: restore afterwards all that :func:`snapshot_model` records; yields the function that does it.

    Inside, no hook on a parameter's gradient is called: it may keep state where nobody can restore it.
    """
    restore = snapshot_model(model, *losses)
    try:
        with GradientHooks(dict(model.named_parameters())).taken_off():
            yield restore
    finally:
        restore()


@contextmanager
def python_kept(model: nn.Module, *losses: Any, is_trial: bool = True) -> Iterator[None]:
    """Context manager: restore the user's Python state, what is frozen and all random states afterwards, but no values.

    A forward may freeze parameters, and so may the step of an optimizer that is tried. Prints of trials are held back.
    """
    state, random = _snapshot_python(model, losses), generator_states()
    modules = [model, *(loss for loss in losses if isinstance(loss, nn.Module))]
    trained = [(parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()]
    try:
        with prints_muted() if is_trial else nullcontext():
            yield
    finally:
        for parameter, flag in trained:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        state()
        restore_generators(random)


def _snapshot_python(model: nn.Module, losses: Sequence[Any]) -> Callable[[], None]:
    losses = (*losses, *model.functions) if isinstance(model, ModelWithLoss) else losses
    return snapshot_names(python_names_of(model, *losses), torch_object_ids(model, *losses))


def snapshot_tensors(model: nn.Module) -> Callable[[], None]:
    """Record parameters, buffers, gradients, what requires them, and random states of GPUs; the returned function
    restores them."""
    all_tensors = (*model.parameters(), *model.buffers())
    tensors = [(t, t.detach().clone(), t.grad, t.is_leaf, t.requires_grad) for t in all_tensors]
    # The modules' own tables too: a forward may replace a buffer by another tensor.
    inner = ("_parameters", "_buffers", "_modules")
    dicts = [(m.__dict__[name], dict(m.__dict__[name])) for m in model.modules() for name in inner]
    devices = {t.device for t in all_tensors if t.device.type == "cuda"}
    device_random = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore() -> None:
        for table, content in dicts:
            table.clear()
            table.update(content)
        with torch.no_grad():
            for tensor, value, grad, leaf, trained in tensors:
                if leaf and not tensor.is_leaf:  # an in-place write has made it part of an autograd graph
                    tensor.detach_()
                tensor.data.copy_(value)
                tensor.grad = grad
                if tensor.is_leaf and tensor.requires_grad is not trained:  # a forward may freeze and unfreeze
                    tensor.requires_grad_(trained)
        for device, state in device_random:
            torch.cuda.set_rng_state(state, device)

    return restore
