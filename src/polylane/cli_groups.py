"""Groups of options: several commands take the same ones, each a dataclass whose fields are options.

A command's function has one parameter for a group. Typer, which reads signatures, is shown the group's fields in its
place: of the option's name and default, with the help of :mod:`.cli_options` (``save_every`` is its ``SaveEvery``).
Help lists them under the group's title.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from typer.core import TyperArgument, TyperCommand

from polylane import cli_options


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group of options, behind those of no group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, each section under its title."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(title_of(parameter), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def title_of(parameter: Any) -> str:
    """Return the title under which help has a parameter of a command."""
    if isinstance(parameter, TyperArgument):
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


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
        inspect.Parameter(field.name, kind, default=_default_of(field), annotation=_annotation_of(field.name, group))
        for field in fields(group)
    ]


def _annotation_of(name: str, group: Any) -> Any:
    kind, option = get_args(getattr(cli_options, "".join(map(str.capitalize, name.split("_")))))
    option = copy.copy(option)
    option.rich_help_panel = group.title
    return Annotated[kind, option]


def _default_of(field: Any) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default
