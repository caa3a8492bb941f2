"""``polylane inspect``: print what was captured of a model, per module, and how a plan cuts and splits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.text import Text

from polylane.cluster.figures import format_size
from polylane.commands import printing
from polylane.commands import user_inputs as inputs
from polylane.errors import PolylaneError, format_plural
from polylane.inspection.graph_report import describe, readable_rows
from polylane.observe.swimlane import render as swimlane
from polylane.plan.fixed_keys import parse_auto

if TYPE_CHECKING:
    from polylane.commands.requests import InspectRequest
    from polylane.compile.compiled_training import CompiledTraining
    from polylane.compile.training_problem import TrainingProblem
    from polylane.cost.operators.profile import Both
    from polylane.graph.graph import Graph
    from polylane.plan.plan import AnyPlan

_OF_A_RANK = ("parameters", "gradients", "values", "time")  # columns of a stage's table that are of one rank


def run(request: InspectRequest) -> None:
    """Capture the model, compile the plan if there is one, write and draw it where asked to, and print.

    Raises:
        PolylaneError: an option, the recipe or the plan is wrong, or a file cannot be written.
    """
    for option, path, verb in (("write", request.plan_file, "writes"), ("svg", request.svg, "draws")):
        if path is not None and request.plan is None:
            raise PolylaneError(f"--{option} {path} {verb} a plan: say which one with --plan, as in --plan pipeline=2")
    plan = None if request.plan is None else _chosen(request.plan, request)
    recipe = inputs.open_recipe(request)
    # Torch is imported only now, after all that can be checked without it.
    from polylane.runtime.workers.threads import limit_to_one_thread

    limit_to_one_thread()
    problem = inputs.open_problem(recipe, request).problem
    report: dict[str, Any] = {"recipe": request.recipe}
    if plan is None:
        graph = problem.capture()
        report |= describe(graph)
    else:
        prepared, seconds = _prepared(problem, plan)
        graph = prepared.main_partition.graph
        report |= {**describe(graph), **_cut(request, prepared, seconds)}
    if request.json:
        printing.print_json(report)
    else:
        _show(graph, report)


def _chosen(text: str, request: InspectRequest) -> AnyPlan:
    """Return the plan, which may be for any number of workers, since none is started."""
    fixed = parse_auto(text)
    return inputs.read_plan(text) if fixed is None else inputs.find_plan(request, fixed=fixed)


def _cut(request: InspectRequest, prepared: CompiledTraining, seconds: tuple[Both, ...]) -> dict[str, Any]:
    """Return the plan's cuts as plain data; write and draw the plan where that is asked for."""
    from polylane.inspection.plan_report import price_stages, report_plan, step_at_best
    from polylane.plan.plan_file import dump

    costs = price_stages(prepared, seconds, request.batch)
    report = report_plan(prepared, costs, seconds, request.batch)
    if request.plan_file is not None:
        printing.write_text(request.plan_file, dump(prepared.plan))
        report["file"] = str(request.plan_file)
    if request.svg is not None:
        printing.write_text(request.svg, swimlane.svg(step_at_best(prepared, costs)))
        report["svg"] = str(request.svg)
    return report


def _prepared(problem: TrainingProblem, plan: AnyPlan) -> tuple[CompiledTraining, tuple[Both, ...]]:
    """Return the training compiled for a plan, and (forward, backward) seconds of every node.

    The graph is captured with one worker's local samples, so that shapes and times are those of a worker.
    """
    from polylane.compile.compiled_training import compile_training
    from polylane.graph.batch import clone_leaves, take_samples
    from polylane.profiling.time_operators import measure_both

    measured: list[tuple[Both, ...]] = []

    def measure(graph: Graph, loss: Any, leaves: list[Any]) -> tuple[float, ...]:
        measured.append(measure_both(graph, problem.model, loss, clone_leaves(leaves)))
        return tuple(map(sum, measured[0]))

    prepared = compile_training(problem, plan, seconds=measure)
    if not measured:  # no cut had to be balanced, but the report needs the times
        graph = prepared.main_partition.graph
        measure(graph, problem.objective.loss, take_samples(problem.flat_example[0], 0, graph.samples))
    return prepared, measured[0]


# Tables --------------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str, left: int = 1) -> printing.WordTable:
    """Return an empty table whose first ``left`` columns are aligned to the left, those of numbers to the right."""
    # A plan's brackets are not rich's markup, so that the title is a Text.
    style = {"title_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    return printing.make_table(Text(title, style="bold"), *columns, left=columns[:left], **style)


def _show(graph: Graph, report: dict[str, Any]) -> None:
    out = printing.console()
    of = f"for {format_plural(graph.samples, 'sample')}" + (f": {report['share']}" if "plan" in report else "")
    table = _table(f"{report['recipe']}, forward, {of}", "module", "nodes", "parameters", "FLOPs", "activations")
    for row in readable_rows(graph):
        name = row.module or "(the model itself)"
        table.add_words(name + (f"  x {row.modules}" if "*" in name else ""), *_numbers(asdict(row)))
    table.add_section()
    table.add_words("all", *_numbers(report))
    printing.print_table(out, table)
    for alias, name in graph.tied.items():
        printing.print_line(f"{alias} is tied to {name}")
    for note in graph.notes:
        printing.print_line(f"note: {note}")
    if not graph.notes:
        print("everything was captured")
    if "plan" in report:
        print()
        _show_cut(out, report)
        if communicators := report["communicators"]:
            numbers = printing.format_extent(communicators)
            print(
                f"communicators of a worker, where NCCL connects GPUs: {numbers}; their memory is not in any prediction"
            )
        show_splits(report["plan"], {axis: split["lines"] for axis, split in report["splits"].items()})
    if "file" in report:
        print()
        printing.print_line(f"{report['file']} has this plan")
    if "svg" in report:
        printing.print_line(f"{report['svg']} shows a step of it as these times let it be at best")


def show_splits(plan: str, splits: Mapping[str, Sequence[str]]) -> None:
    """Print, for every axis along which operators are split, the lines that explain the placements.

    Args:
        plan: the plan in one line, for the headings.
        splits: axis name -> lines for people.
    """
    out = printing.console()
    for axis, lines in splits.items():
        print()
        out.print(f"How operators are split along {axis}, by {plan}", style="bold", markup=False)
        for line in lines:
            out.print(line, markup=False, soft_wrap=True)


def _numbers(data: dict[str, Any]) -> list[str]:
    return [
        str(data["nodes"]),
        printing.format_count(data["parameters"]),
        printing.format_count(data["flops"]),
        printing.format_count(data["bytes"], "B"),
    ]


def _show_cut(out: Console, report: dict[str, Any]) -> None:
    _show_stages(out, report)
    print(f"utilization at best {report['utilization']:.1%}: by these times, if ranks waited for other stages alone")
    if (gathers := report["gathers"]) is not None:
        print(
            f"passes gather {printing.format_count(gathers['cast'])} of {printing.format_count(gathers['parameters'])} "
            f"parameters in {gathers['dtype']}: those that they cast wherever they read them"
        )
    meshes = [stage["mesh"] for stage in report["stages"]]
    for edge in report["edges"]:
        a, b = edge["from"], edge["to"]
        back = f", {printing.format_count(edge['back'], 'B')} back" if edge["back"] else ""
        print(
            f"stage {a} ({meshes[a]}) -> stage {b} ({meshes[b]}): {printing.format_count(edge['bytes'], 'B')} each "
            f"microbatch{back}"
        )
    if not report["crossings"]:
        print("no value crosses between stages")
        return
    title = f"What crosses, for {format_plural(report['samples'], 'sample')}"
    crossings = _table(title, "value", "shape", "stages", "gradient", "bytes", left=4)
    for crossing in report["crossings"]:
        crossings.add_words(
            crossing["value"],
            f"{crossing['dtype']} {' x '.join(map(str, crossing['shape']))}",
            f"{crossing['from']} -> {', '.join(map(str, crossing['to']))}",
            "comes back" if crossing["gradient"] else "none",
            printing.format_count(crossing["bytes"], "B"),
        )
    printing.print_table(out, crossings)


def _show_stages(out: Console, report: dict[str, Any]) -> None:
    # The columns "mesh" and "after" are needed only where meshes differ or stages branch.
    uniform = len({stage["mesh"] for stage in report["stages"]}) == 1
    uniform = uniform and all(stage["after"] == list(range(n))[-1:] for n, stage in enumerate(report["stages"]))
    extra_columns = () if uniform else ("mesh", "after")
    named = ("stage", "workers", *extra_columns, "first node", "last node")
    stages = _table(report["plan"], *named, *_OF_A_RANK, left=len(named))
    stages.columns[named.index("workers")].no_wrap = True
    for stage in report["stages"]:
        extra_cells = () if uniform else (stage["mesh"], ", ".join(map(str, stage["after"])) or "-")
        stages.add_words(
            str(stage["stage"]),
            printing.format_ranges(stage["devices"]),
            *extra_cells,
            stage["first"],
            stage["last"],
            format_size(stage["parameter_bytes"]),
            format_size(stage["gradient_bytes"]),
            format_size(stage["held"]),
            f"{printing.format_duration(stage['seconds'])} ({stage['time_share']:.0%})",
        )
    printing.print_table(out, stages)
    print(
        "of a rank: bytes of parameters, gradients and values (kept for backward passes, of all microbatches that are "
        "live at once), and time of both passes over a microbatch (of all work, the stage's share)"
    )
