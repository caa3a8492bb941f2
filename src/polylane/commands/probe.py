"""``polylane probe``: measure this machine into a cluster file, and a recipe's own operators into a profile."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from polylane.commands import user_inputs as inputs
from polylane.commands.printing import print_json, print_line, write_text
from polylane.errors import PolylaneError, format_plural

if TYPE_CHECKING:
    from polylane.cluster.device import Device
    from polylane.commands.requests import ProbeRequest, RecipeRequest
    from polylane.cost.operators.profile import Profile
    from polylane.graph.graph import Graph
    from polylane.probe.conclusion import MeasuredMachine
    from polylane.probe.effort import Effort
    from polylane.profiling.machine_load import MachineLoad
    from polylane.runtime.workers.launch_environment import Launch
    from polylane.runtime.workers.started_worker import WorkerContext


def run(request: ProbeRequest, effort: Effort | None = None) -> None:
    """Measure what is asked for, and print the figures.

    Args:
        request: the options of the command line.
        effort: how many cases are measured, and how often; None: as many as the type of device needs.

    Raises:
        PolylaneError: nothing is asked for, a file cannot be written, there are no workers or more than the machine
            can hold, or a recipe is wrong; with a launcher, its workers do not meet, or a host does not reach another.
    """
    output, workers = request.output, request.workers
    if output is None and not request.recipes:
        raise PolylaneError("nothing to measure: give -o FILE for this machine, or --profile RECIPE for a recipe")
    from polylane.probe.machine import check_workers, usual_workers
    from polylane.runtime.workers.launch_environment import Launch
    from polylane.runtime.workers.threads import limit_to_one_thread

    launch = Launch.of_process()
    if output is not None and launch.size == 1:
        _check_writable(output)
    limit_to_one_thread()
    if launch.size > 1:
        _refuse_of_launcher(request, launch)
        assert output is not None
        measured = _hosts(output, launch, effort, request.json)
        if request.json and launch.is_first:
            print_json(measured)
        return
    count = usual_workers() if workers is None else workers
    check_workers(count)
    figures: dict[str, Any] = {"workers": count}
    if output is not None:
        figures |= _machine(output, count, effort, request.json)
    profiles = [_recipe(recipe, count) for recipe in request.recipes]
    if request.json:
        print_json({**figures, "profiles": profiles})


# ---- several hosts ---------------------------------------------------------------------------------------------------


def _refuse_of_launcher(request: ProbeRequest, launch: Launch) -> None:
    """Refuse what is not measured by the workers of a launcher."""
    if request.recipes:
        raise PolylaneError(
            f"--profile measures a recipe on one machine: leave it out, or start probe on one host without "
            f"{launch.launcher}"
        )
    if request.workers not in (None, launch.local_size):
        raise PolylaneError(
            f"--workers {request.workers}: {launch.launcher} has started {launch.local_size} on this host; leave it out"
        )


def _hosts(output: Path, launch: Launch, effort: Effort | None, json: bool) -> dict[str, Any]:
    """Measure all hosts; rank 0 writes the cluster file. Return the figures as plain data."""
    from polylane.probe.effort import thorough
    from polylane.probe.machine import accelerators
    from polylane.probe.several_hosts import measure_hosts
    from polylane.profiling.machine_load import LoadWatch

    start, watch, problem = time.perf_counter(), LoadWatch(), ""
    try:
        if launch.is_first:
            _check_writable(output)
    except PolylaneError as error:  # for all workers: the others would wait for this one
        problem = str(error)
    with closing(_Display(None)) as display:
        effort = effort or thorough("cuda" if accelerators() else "cpu")
        measured = measure_hosts(launch, effort, display if launch.is_first else _tell_nobody, problem)
    load, slowest = watch.read(), measured.slowest_pair()
    ends = [measured.hosts[slowest.source].name, measured.hosts[slowest.target].name]
    rates = [pair.bandwidth for pair in measured.pairs]
    if launch.is_first:
        write_text(output, measured.text(time.strftime("%Y-%m-%d %H:%M"), load))
    seconds = time.perf_counter() - start
    if launch.is_first and not json:
        cluster, (median, worst) = measured.cluster, measured.link
        print(f"{format_plural(cluster.count, 'worker')} on {format_plural(len(measured.hosts), 'host')}")
        print(
            f"between hosts: {8 * min(rates) / 1e9:.2f} to {8 * max(rates) / 1e9:.2f} Gb/s, the least from {ends[0]} "
            f"to {ends[1]}; messages known to within {median:.0%} (median; worst {worst:.0%})"
        )
        for rank, speed in cluster.speeds.items():
            name = next(host.name for host in measured.hosts if rank in host.ranks)
            print(f"rank {rank} on {name} computes {speed:g} times as fast as the host that stands for its kind")
        print_line(f"{output} is written, in {seconds:.0f} s")
    return {
        "file": str(output),
        "seconds": seconds,
        "hosts": [host.name for host in measured.hosts],
        "pairs": [vars(pair) for pair in measured.pairs],
        "speeds": dict(measured.cluster.speeds),
        "messages": {"median": measured.link[0], "worst": measured.link[1]},
    }


# ---- this machine ----------------------------------------------------------------------------------------------------


def _machine(output: Path, workers: int, effort: Effort | None, json: bool) -> dict[str, Any]:
    """Measure the machine, write its cluster file, and return the figures as plain data."""
    from polylane.probe.conclusion import conclude
    from polylane.probe.effort import thorough
    from polylane.probe.machine import accelerators
    from polylane.probe.measure import further_dtypes, measure_machine, traffic_worlds
    from polylane.profiling.machine_load import LoadWatch

    kind = "cuda" if accelerators() else "cpu"
    effort = effort or thorough(kind)
    start, watch = time.perf_counter(), LoadWatch()
    ticks = effort.progress_ticks(workers, len(further_dtypes(kind)), traffic_worlds(workers))
    with closing(_Display(ticks)) as display:
        measured = conclude(measure_machine(workers, effort, display), workers)
    load = watch.read()
    write_text(output, measured.text(time.strftime("%Y-%m-%d %H:%M"), load))
    seconds = time.perf_counter() - start
    if not json:
        _print_machine(measured, output, seconds, load)
    link = None if measured.link is None else {"median": measured.link[0], "worst": measured.link[1]}
    off = {"median": measured.device.median, "worst": measured.device.worst, "families": measured.device.families}
    foreign = {"cores": load.foreign_cores, "slowdown": load.slowdown, "disturbing": load.is_disturbing}
    return {"file": str(output), "seconds": seconds, "load": foreign, "operators": off, "messages": link}


def _print_machine(measured: MeasuredMachine, output: Path, seconds: float, load: MachineLoad) -> None:
    host = measured.cluster.hosts[0]
    device, link, off = host.device, host.link, measured.device
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {dtype}" for dtype, rate in device.achieved.items())
    print(f"{format_plural(host.devices, 'worker')} of {format_plural(measured.threads, 'thread')} on {device.kind}")
    print(f"matmuls: {rates}")
    print(f"memory: {device.bandwidth / 1e9:,.1f} GB/s; an operator takes {device.overhead * 1e6:.1f} us at least")
    print(f"these figures tell operators to within {off.median:.0%} (median; worst {off.worst:.0%}, {off.worst_case})")
    if link is not None and measured.link is not None:
        median, worst = measured.link
        print(f"messages: {link.bandwidth / 1e9:.2f} GB/s, known to within {median:.0%} (median; worst {worst:.0%})")
    if load.is_disturbing:
        print(f"meanwhile {load}: measure again when the machine is idle")
    print_line(f"{output} is written, in {seconds:.0f} s")


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before a minute is spent on measuring.

    Raises:
        PolylaneError: the file cannot be written.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened for appending, so that a file of an earlier probe is not lost if measuring fails.
        with path.open("a", encoding="utf-8"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise PolylaneError(f"{path} cannot be written: {error.strerror or error}") from error


def _tell_nobody(label: str, parts: int) -> None:
    pass


class _Display:
    """Progress on stderr: a bar on a terminal, else a line for each kind of work.

    The bar has a thread, and so starts with the first message: after the workers were forked.

    Args:
        total: number of parts of work; None: not known, and no bar is shown.
    """

    def __init__(self, total: int | None) -> None:
        self._total, self._what = total, ""
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._done = 0

    def __call__(self, label: str, parts: int) -> None:
        """Count ``parts`` more parts of this work as done."""
        self._done += parts
        if self._total is None or not self._console.is_terminal:
            if label != self._what:
                print(f"measuring {label}", file=sys.stderr, flush=True)
            self._what = label
            return
        if self._progress is None:
            columns = (TextColumn("measuring {task.description:16}"), BarColumn(), TaskProgressColumn())
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._progress.add_task(label, total=self._total)
            self._progress.start()
        self._progress.update(self._task, description=label, completed=self._done)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._progress is not None:
            self._progress.stop()


# ---- a recipe's nodes ------------------------------------------------------------------------------------------------


def _recipe(request: RecipeRequest, workers: int) -> dict[str, Any]:
    """Measure a recipe's nodes in a process of their own, keep the profile, and return its figures as plain data."""
    from polylane.runtime.workers.team import choose_start_method, start_workers
    from polylane.runtime.workers.threads import threads_per_worker

    start, path = time.perf_counter(), request.recipe
    if not request.json:
        print(f"measuring the operators of {path}", file=sys.stderr, flush=True)
    worker = partial(_measure_worker, request, threads_per_worker(workers))
    file, nodes, samples = start_workers(worker, 1, start_method=choose_start_method())[0]
    seconds = time.perf_counter() - start
    if not request.json:
        sizes = ", ".join(map(str, samples))
        print(f"{path}: {format_plural(nodes, 'node')} at batches of {sizes}, in {seconds:.0f} s; kept in {file}")
    return {"recipe": path, "file": str(file), "nodes": nodes, "samples": list(samples), "seconds": seconds}


def _measure_worker(request: RecipeRequest, threads: int, context: WorkerContext) -> tuple[Path, int, tuple[int, ...]]:
    """Measure in the worker process, keep the profile, and return its file, number of nodes and batch sizes."""
    import torch

    from polylane.probe.profiles import save_profile

    torch.set_num_threads(threads)
    graph, profile = _profile(request, context.device)
    return save_profile(profile, graph, _device(), threads), len(graph.nodes), profile.samples


def _device() -> Device:
    """Return a device with the name of this machine's; the other figures are not used for a profile's key."""
    from polylane.cluster.catalogue import device_presets
    from polylane.cluster.device import Device
    from polylane.probe.machine import accelerators, device_kind

    preset = Device.model_validate(device_presets()["a100-80g" if accelerators() else "cpu"])
    return preset.model_copy(update={"kind": device_kind()})


def _profile(request: RecipeRequest, device: Any) -> tuple[Graph, Profile]:
    from polylane.auto.choose import EXAMPLE
    from polylane.auto.choose import measure as measure_profile
    from polylane.graph.batch import to_device

    recipe = inputs.open_recipe(request)
    problem = inputs.open_problem(recipe, request).problem
    leaves, rebuild = problem.flat_example
    problem = replace(problem, model=problem.model.to(device), example=rebuild(to_device(leaves, device)))
    graph = problem.capture(EXAMPLE)
    profile = measure_profile(graph, problem)
    if profile is None:
        raise PolylaneError(f"{request.recipe}: the model could not be captured, so its operators cannot be measured")
    return graph, profile
