"""``polylane inspect``: what was captured of a model, per module, and how a plan cuts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polylane.commands import inputs
from polylane.commands.automatic import automatic
from polylane.commands.output import console, count, plural, print_json, ranges, write
from polylane.errors import PolylaneError
from polylane.inspection.graph_report import describe, readable_rows
from polylane.observe import swimlane
from polylane.observe.lane_layout import duration
from polylane.plan.spec import AUTO

if TYPE_CHECKING:
    from torch import nn

    from polylane.cost.profile import Both
    from polylane.graph.graph import Graph
    from polylane.plan.plan import Plan
    from polylane.plan.spec import Spec
    from polylane.recipe import Recipe
    from polylane.runtime.prepare import Objective, Prepared

_OF_A_RANK = ("parameters", "gradients", "values", "time")  # what is shown of every stage


def run(
    path: str,
    *,
    plan: str | None,
    batch: int,
    settings: Sequence[str],
    file: Path | None = None,
    svg: Path | None = None,
    json: bool,
) -> None:
    """Capture, cut where there is a plan, write and draw that where asked to, and print.

    Raises:
        PolylaneError: what was given is wrong, or the file cannot be written.
    """
    if file is not None and plan is None:
        raise PolylaneError(f"--write {file} writes a plan: say which one with --plan, as in --plan pipeline=2")
    if svg is not None and plan is None:
        raise PolylaneError(f"--svg {svg} draws a plan: say which one with --plan, as in --plan pipeline=2")
    chosen = None if plan is None else _chosen(plan, path, settings, batch)
    recipe = inputs.open_recipe(path, settings)
    from polylane.runtime.launch import single_threaded

    single_threaded()
    from polylane.runtime.prepare import Objective

    model = inputs.build_model(recipe, seed=0)
    inputs.rehearse_optimizer(recipe, model)
    example = inputs.example_batch(recipe, inputs.open_data(recipe, "train"), batch)
    objective = Objective("loss", recipe.loss, recipe.optimizer, recipe.scheduler)
    found = {"recipe": path}
    if chosen is None:
        graph = _captured(recipe, model, objective, example)
        found |= describe(graph)
    else:
        from polylane.inspection.plan_report import price_stages, report_plan, step_at_best

        prepared, seconds = _prepared(model, objective, example, chosen, batch)
        graph = prepared.main.graph
        costs = price_stages(prepared, seconds, batch)
        found |= {**describe(graph), **report_plan(prepared, costs, seconds, batch)}
        if file is not None:
            from polylane.plan.plan import dump

            write(file, dump(prepared.plan))
            found["file"] = str(file)
        if svg is not None:
            write(svg, swimlane.svg(step_at_best(prepared, costs)))
            found["svg"] = str(svg)
    if json:
        print_json(found)
    else:
        _show(graph, found)


def _chosen(plan: str, path: str, settings: Sequence[str], batch: int) -> Spec | Plan:
    """A plan for any number of workers: none of them is started."""
    if plan != AUTO:
        return inputs.read_plan(plan)
    return inputs.choose_plan(plan, None, lambda most: automatic(path, settings, batch, most))


def _captured(recipe: Recipe, model: nn.Module, objective: Objective, example: Any) -> Graph:
    from polylane.runtime.prepare import named_parameters, optimized
    from polylane.samples.counts import capture_with_counts

    trainable = optimized(named_parameters(model, [recipe.loss]), objective.optimizer)
    return capture_with_counts(model, recipe.loss, example, trainable=trainable)


def _prepared(
    model: nn.Module, objective: Objective, example: Any, plan: Spec | Plan, batch: int
) -> tuple[Prepared, tuple[Both, ...]]:
    """The graph of what one worker has in hand, cut; and the times of every node."""
    from polylane.graph.batch import cloned, flatten, take
    from polylane.profiling.time_operators import measure_both
    from polylane.runtime.prepare import prepare

    measured: list[tuple[Both, ...]] = []

    def measure(graph: Graph, loss: Any, leaves: list[Any]) -> tuple[float, ...]:
        measured.append(measure_both(graph, model, loss, cloned(leaves)))
        return tuple(map(sum, measured[0]))

    prepared = prepare(model, {objective.name: objective}, example, plan, batch_size=batch, seconds=measure)
    if not measured:  # nothing had to be balanced
        leaves, _ = flatten(example)
        measure(prepared.main.graph, objective.loss, take(leaves, 0, prepared.main.graph.samples))
    return prepared, measured[0]


# Tables --------------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """The first columns to the left, the numbers to the right."""
    # A plan has brackets, which are no markup.
    heading = Text(title, style="bold")
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    return table


def _show(graph: Graph, found: dict[str, Any]) -> None:
    out = console()
    of = f"for {plural(graph.samples, 'sample')}" + (f": {found['share']}" if "plan" in found else "")
    table = _table(f"{found['recipe']}, forward, {of}", "module", "nodes", "parameters", "FLOPs", "activations")
    for row in readable_rows(graph):
        name = row.module or "(the model itself)"
        table.add_row(name + (f"  x {row.modules}" if "*" in name else ""), *_numbers(asdict(row)))
    table.add_section()
    table.add_row("all", *_numbers(found))
    out.print(table)
    for alias, name in graph.tied.items():
        print(f"{alias} is tied to {name}")
    for note in graph.notes:
        print(f"note: {note}")
    if not graph.notes:
        print("everything was captured")
    if "plan" in found:
        print()
        _show_cut(out, found)
        show_splits(found["plan"], {axis: split["lines"] for axis, split in found["splits"].items()})
    if "file" in found:
        print(f"\n{found['file']} has this plan")
    if "svg" in found:
        print(f"{found['svg']} shows a step of it as these times let it be at best")


def show_splits(plan: str, splits: Mapping[str, Sequence[str]]) -> None:
    """Print, for every axis along which operators are split, the lines that explain how."""
    out = console()
    for axis, lines in splits.items():
        print()
        out.print(f"How operators are split along {axis}, by {plan}", style="bold", markup=False)
        for line in lines:
            out.print(line, markup=False, soft_wrap=True)


def _numbers(data: dict[str, Any]) -> list[str]:
    return [str(data["nodes"]), count(data["parameters"]), count(data["flops"]), count(data["bytes"], "B")]


def _show_cut(out: Console, found: dict[str, Any]) -> None:
    _show_stages(out, found)
    print(
        f"utilization at best {found['utilization']:.1%}: by these times, were there nothing to wait for but the other "
        "stages"
    )
    meshes = [stage["mesh"] for stage in found["stages"]]
    for edge in found["edges"]:
        a, b = edge["from"], edge["to"]
        back = f", {count(edge['back'], 'B')} back" if edge["back"] else ""
        print(f"stage {a} ({meshes[a]}) -> stage {b} ({meshes[b]}): {count(edge['bytes'], 'B')} each microbatch{back}")
    if not found["crossings"]:
        print("no value crosses between stages")
        return
    title = f"What crosses, for {plural(found['samples'], 'sample')}"
    crossings = _table(title, "value", "shape", "stages", "gradient", "bytes", left=4)
    for crossing in found["crossings"]:
        crossings.add_row(
            Text(crossing["value"]),
            f"{crossing['dtype']} {' x '.join(map(str, crossing['shape']))}",
            f"{crossing['from']} -> {', '.join(map(str, crossing['to']))}",
            "comes back" if crossing["gradient"] else "none",
            count(crossing["bytes"], "B"),
        )
    out.print(crossings)


def _show_stages(out: Console, found: dict[str, Any]) -> None:
    # In a chain of meshes that are all alike the title says it.
    alike = len({stage["mesh"] for stage in found["stages"]}) == 1
    alike = alike and all(stage["after"] == list(range(n))[-1:] for n, stage in enumerate(found["stages"]))
    apart = () if alike else ("mesh", "after")
    named = ("stage", "workers", *apart, "first node", "last node")
    stages = _table(found["plan"], *named, *_OF_A_RANK, left=len(named))
    stages.columns[named.index("workers")].no_wrap = True
    for stage in found["stages"]:
        own = () if alike else (stage["mesh"], ", ".join(map(str, stage["after"])) or "-")
        stages.add_row(
            str(stage["stage"]),
            ranges(stage["devices"]),
            *own,
            Text(stage["first"]),
            Text(stage["last"]),
            count(stage["parameter_bytes"], "B"),
            count(stage["gradient_bytes"], "B"),
            count(stage["held"], "B"),
            f"{duration(stage['seconds'], 'seconds', digits=3)} ({stage['time_share']:.0%})",
        )
    out.print(stages)
    print(
        "of a rank: bytes of parameters, gradients and values (kept for backward passes, of all microbatches in hand "
        "at once), and time of both passes over a microbatch (of all work, the stage's share)"
    )
