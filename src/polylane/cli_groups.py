"""Groups of options: several commands take the same ones, each a dataclass whose fields are options.

A command's function has one parameter for a group. Typer, which reads signatures, is shown the group's fields in its
place: of the option's name and default, with the help of :mod:`.cli_options` (``save_every`` is its ``SaveEvery``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from polylane import cli_options


def spread_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the options of its groups one by one, and calls the function with the groups.

    Args:
        command: the command's function; a parameter whose type is a dataclass is a group.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = list[inspect.Parameter](), dict[str, type]()
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(group := hints[name], type) and is_dataclass(group):
            groups[name] = group
            parameters += _list_options(group)
        else:
            # Those of groups are given by name, and so must be all behind them.
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))

    @functools.wraps(command)
    def call(**options: Any) -> None:
        filled = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**options, **filled)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del call.__wrapped__  # Typer would look through it
    return call


def _list_options(group: type) -> list[inspect.Parameter]:
    """Return the options of a group, in the order of its fields."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=_default_of(field), annotation=_annotation_of(field.name))
        for field in fields(group)
    ]


def _annotation_of(name: str) -> Any:
    return getattr(cli_options, "".join(map(str.capitalize, name.split("_"))))


def _default_of(field: Any) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
