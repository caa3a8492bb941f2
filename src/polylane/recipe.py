"""Recipe: the user's Python file with the functions that make a model, its loss, its optimizer and its data."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from polylane.errors import INTERRUPTIONS, PolylaneError, describe_message
from polylane.settings import parse_setting

if TYPE_CHECKING:  # torch takes a second to import, and `polylane --help` reads this file
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

SIGNATURES: Mapping[str, str] = {
    "model": "model() -> nn.Module",
    "loss": "loss(model, batch) -> Tensor | polylane.Mean",
    "optimizer": "optimizer(parameters) -> torch.optim.Optimizer",
    "data": "data(split) -> Dataset",
    "scheduler": "scheduler(optimizer) -> LRScheduler",
    "collate": "collate(samples) -> batch",
    "init": "init(module) -> None",
    "metrics": "metrics(model, batch) -> dict",
    "sampler": "sampler(dataset) -> Sampler",
    "callbacks": "callbacks() -> list of polylane.Callback",
}
REQUIRED = ("model", "loss", "optimizer", "data")
ARGUMENTS = {"model": 0, "loss": 2, "optimizer": 1, "data": 1, "scheduler": 1, "collate": 1, "init": 1}
ARGUMENTS |= {"metrics": 2, "callbacks": 0, "sampler": 1}


class RecipeError(PolylaneError):
    """A recipe cannot be found, imported or called, or does not have a setting."""


@dataclass(frozen=True, eq=False)
class Mean:
    """A loss, or a metric, that is a mean over parts that may be unequal: tokens, pixels, valid labels.

    The mean of unequal parts is not the mean of their means; the sum of ``total`` over the sum of ``count`` is.

    Args:
        total: scalar tensor, the sum of the loss over the elements that count.
        count: number of these elements, or the sum of their weights; a scalar, through which no gradient flows.

    Examples:
        The loss of a language model, whose sequences have different numbers of labels:

        >>> import torch, polylane
        >>> from torch.nn import functional as F
        >>> def loss(model, batch):
        ...     tokens, labels = batch
        ...     total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="sum")
        ...     return polylane.Mean(total, (labels != -1).sum())
        >>> model = torch.nn.Embedding(10, 10)
        >>> labels = torch.tensor([[1, 2, -1], [3, -1, -1]])
        >>> loss(model, (torch.zeros(2, 3, dtype=torch.long), labels)).count
        tensor(3)
    """

    total: Tensor
    count: Tensor | float

    def __post_init__(self) -> None:
        if getattr(self.count, "requires_grad", False):
            object.__setattr__(self, "count", self.count.detach())  # type: ignore[union-attr]

    @property
    def value(self) -> Tensor:
        """The mean itself, a scalar.

        Examples:
            >>> polylane.Mean(torch.tensor(6.0), 3).value
            tensor(2.)
        """
        return self.total / self.count


@dataclass(frozen=True)
class Recipe:
    """The functions of a recipe, each already bound to its settings.

    Attributes:
        model: builds the model, freshly initialised.
        loss: (model, batch) to a scalar mean over the batch, or a ``Mean``.
        optimizer: (name, Parameter) pairs, as ``torch.optim`` takes them, to an optimizer.
        data: "train" or "test" to a map-style or iterable dataset, or a list of samples.
        path: path of the recipe's file.
        name: name of the file, without ``.py``.
        settings: values that ``--set`` overrode, as text, by the name that the user gave.
        scheduler: optimizer to a learning-rate scheduler, if the recipe has one. Arguments ``steps_per_epoch`` and
            ``total_steps`` are given the training's.
        collate: a list of samples to a batch; torch's default where the recipe has none.
        init: for a model that is built on the meta device: fills the tensors that a module itself owns.
        callbacks: returns what is called while training, on every worker, if the recipe has it.
        sampler: training dataset to a sampler or any series of indices, the order of an epoch; None: shuffled.
        metrics: (model, batch) to a dict of what is reported of the test data besides the loss, if the recipe has it.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor | Mean]
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
    data: Callable[[str], Any]
    path: Path
    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    init: Callable[[nn.Module], None] | None = None
    sampler: Callable[[Any], Iterable[int]] | None = None
    metrics: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    callbacks: Callable[[], Sequence[Any]] | None = None


def load(path_or_module: str | os.PathLike[str], settings: Mapping[str, str] | None = None) -> Recipe:
    """Load the recipe at a Python file's path, or in an importable ``package.module``.

    The file is imported once per process, as Python imports any module, with its folder on ``sys.path``.

    Args:
        path_or_module: path of a file such as ``examples/digits.py``, or a name such as ``package.module``.
        settings: new values for keyword arguments, as text: ``{"layers": "4"}``. A name sets the argument in every
            function that has it, ``model.layers`` sets it in one.

    Raises:
        RecipeError: one sentence, for every way in which a recipe or a setting can be wrong.
    """
    settings = dict(settings or {})
    module = _import_module(os.fspath(path_or_module))
    path = Path(module.__file__ or str(path_or_module))
    functions = _collect_functions(module, path)
    overrides = _parse_overrides(functions, settings, path)
    bound = {
        name: functools.partial(function, **overrides[name]) if overrides[name] else function
        for name, function in functions.items()
    }
    return Recipe(path=path, name=path.stem, settings=settings, **bound)


def parse_assignments(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``["layers=4", "dropout=0"]`` into the mapping that ``load`` takes; the last of equal names wins.

    Raises:
        RecipeError: a text is not of the form name=value.
    """
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise RecipeError(f"--set takes name=value, and {text!r} is not of that form.")
        settings[name.strip()] = value
    return settings


# Importing -----------------------------------------------------------------------------------------------------------


def _import_module(target: str) -> ModuleType:
    """Import the module at a path or of a dotted name."""
    path = Path(target).expanduser()
    if os.path.isdir(path):
        raise RecipeError(f"{target} is a folder; a recipe is a Python file or a package.module.")
    if path.suffix == ".py" or os.sep in target or os.path.isfile(path):
        if not os.path.isfile(path):  # Path.is_file raises for names that are too long
            raise RecipeError(f"There is no recipe at {target}.")
        if path.suffix != ".py":
            raise RecipeError(f"{target} is not a Python file; a recipe's name ends with .py.")
        return _import_file(path.resolve())
    return _import_name(target)


def _import_file(path: Path) -> ModuleType:
    added = _add_to_path(path.parent)
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    _refuse_script(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses, pickle and typing look a class's module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        _remove_from_path(added)
        if isinstance(error, INTERRUPTIONS):
            raise
        raise RecipeError(_describe_import_error(error, path)) from error
    return module


def _refuse_script(path: Path) -> None:
    """Refuse a script that prepares what it trains, and has none of a recipe's functions, before it trains."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # which the import explains
        return
    if prepares_training(tree) and not {getattr(node, "name", "") for node in tree.body} & {*REQUIRED}:
        raise RecipeError(
            f"{shorten_path(path)} has a training loop of its own, and is no recipe: start it with polylane run, and "
            "compare it with one device with polylane verify."
        )


def prepares_training(tree: ast.Module) -> bool:
    """Return whether a file's code names ``polylane.prepare``, or imports a bridge to another library's trainer."""
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    modules = names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    is_bridged = any(module.startswith("polylane.integrations.") for module in modules)
    return is_bridged or ("polylane" in modules and "prepare" in names)


def _import_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise RecipeError(f"There is no recipe {name!r}: neither a Python file nor a module.")
    added = _add_to_path(Path.cwd())  # as `python -m` does; an installed command does not
    try:
        return importlib.import_module(name)
    except INTERRUPTIONS:
        raise
    except BaseException as error:
        path = _find_source_file(name.partition(".")[0]) or _find_source_file(name)
        _remove_from_path(added)
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise RecipeError(f"There is no recipe {name!r}: neither a Python file nor a module.") from error
        raise RecipeError(_describe_import_error(error, path or Path(name))) from error


def _module_name(path: Path) -> str:
    """Return the name under which the file is imported: its own, unless that is another module's already.

    With its own name, another process that has the folder on its path can unpickle what the recipe defines.
    """
    stem = path.stem
    loaded = sys.modules.get(stem)
    if loaded is not None:
        free = getattr(loaded, "__file__", None) is not None and Path(str(loaded.__file__)).resolve() == path
    else:
        free = stem.isidentifier() and _find_source_file(stem) == path
    if free:
        return stem
    # Any other name must differ between files of equal stem, and be the same in every worker.
    folder = "".join(letter if letter.isalnum() else "_" for letter in str(path.parent))
    return f"polylane_recipe{folder}_{stem}"


def _find_source_file(name: str) -> Path | None:
    """Return the file that importing ``name`` would run, if any."""
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # a dotted name's parents are imported, and may raise anything
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.has_location else None


def _add_to_path(folder: Path) -> str | None:
    """Put a folder first on ``sys.path``, as for a script run from it; returns what was added, if anything."""
    if str(folder) in sys.path:
        return None
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return str(folder)


def _remove_from_path(added: str | None) -> None:
    if added is not None and added in sys.path:
        sys.path.remove(added)


def _describe_import_error(error: BaseException, path: Path) -> str:
    """Describe, in one sentence, the user's own line at which the import failed, and what was raised there."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shorten_path(Path(error.filename))}, line {error.lineno}: {kind}: {error.msg}."
    message = describe_message(error)
    line = deepest_own_line(error, path)
    location = shorten_path(path) if line is None else f"{shorten_path(Path(line.filename))}, line {line.lineno}"
    return f"{location}: {kind}: {message.rstrip('.')}."


def deepest_own_line(error: BaseException, path: Path) -> traceback.FrameSummary | None:
    """Return the deepest of the user's own lines that led to an error; None if there is none.

    It may be in a file beside the recipe at ``path``; site-packages are not the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = (f for f in frames if Path(f.filename).is_relative_to(path.parent) and "site-packages" not in f.filename)
    return next(reversed(list(lines)), None)


def shorten_path(path: Path) -> str:
    """Shorten a path to what the user would type in the current directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# The functions -------------------------------------------------------------------------------------------------------


def _collect_functions(module: ModuleType, path: Path) -> dict[str, Callable[..., Any]]:
    """Collect the recipe's functions by name, each checked to be callable with its arguments."""
    missing = [SIGNATURES[name] for name in REQUIRED if not hasattr(module, name)]
    if missing:
        names = f"function {missing[0]}" if len(missing) == 1 else f"functions {'; '.join(missing)}"
        raise RecipeError(f"{shorten_path(path)} lacks the {names}.")
    functions = {}
    for name, signature in SIGNATURES.items():
        function = getattr(module, name, None)
        if function is None and name not in REQUIRED:
            continue
        if not callable(function):
            kind = type(function).__name__
            raise RecipeError(f"{name} in {shorten_path(path)} is of type {kind} and should be a function {signature}.")
        _check_call(name, function, path)
        functions[name] = function
    return functions


def _check_call(name: str, function: Callable[..., Any], path: Path) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none: they are checked by calling them
        return
    try:
        signature.bind(*range(ARGUMENTS[name]))
    except TypeError as error:
        parameters = ", ".join(signature.parameters)
        raise RecipeError(
            f"{name} in {shorten_path(path)} is called as {SIGNATURES[name]}, and {name}({parameters}) does not "
            f"admit that ({error}); further arguments need defaults."
        ) from error


# The settings --------------------------------------------------------------------------------------------------------


def _parse_overrides(
    functions: Mapping[str, Callable[..., Any]], settings: Mapping[str, str], path: Path
) -> dict[str, dict[str, Any]]:
    """Return, for every function, the keyword arguments that the settings override."""
    defaults = {name: _settable_defaults(name, function) for name, function in functions.items()}
    overrides: dict[str, dict[str, Any]] = {name: {} for name in functions}
    # Names with a dot come last: model.layers is more precise than layers.
    for key, text in sorted(settings.items(), key=lambda item: "." in item[0]):
        function, _, argument = key.rpartition(".")
        owners = [name for name in defaults if argument in defaults[name] and function in ("", name)]
        if not owners:
            raise RecipeError(_describe_unknown_setting(key, defaults, path))
        for owner in owners:
            overrides[owner][argument] = _parse_value(f"{owner}.{argument}", text, defaults[owner][argument], path)
    return overrides


def _settable_defaults(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword arguments of a recipe function that a user may set: those with a default, after the fixed."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    fixed = ARGUMENTS[name]
    settable = [p for p in parameters[:fixed] if p.kind is inspect.Parameter.KEYWORD_ONLY] + parameters[fixed:]
    return {p.name: p.default for p in settable if p.default is not p.empty and p.kind in by_name}


def _describe_unknown_setting(key: str, defaults: Mapping[str, Mapping[str, Any]], path: Path) -> str:
    listing = [f"{name}.{argument} = {value!r}" for name in defaults for argument, value in defaults[name].items()]
    if not listing:
        return (
            f"{shorten_path(path)} has no setting {key!r}, nor any other: none of its functions has keyword arguments."
        )
    names = [argument for arguments in defaults.values() for argument in arguments]
    close = difflib.get_close_matches(key.rpartition(".")[2], names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{shorten_path(path)} has no setting {key!r}{hint}; it has {', '.join(listing)}."


def _parse_value(name: str, text: str, default: Any, path: Path) -> Any:
    try:
        return parse_setting(text, default)
    except ValueError as error:
        raise RecipeError(f"{name} in {shorten_path(path)} {error}.") from error
