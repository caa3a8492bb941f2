"""Slurm: a batch script that starts torchrun on each node, or on one node polylane itself."""

from __future__ import annotations

import itertools
import shlex

from polylane.commands.launching.cluster_job import ClusterJob

REQUEUE = 'scontrol requeue "$SLURM_JOB_ID"'
WIDTH = 100  # letters of a line of the script's commands


def write_script(job: ClusterJob) -> str:
    """Return the batch script, for ``sbatch``."""
    options = {
        "job-name": job.name,
        "nodes": job.hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": job.workers if job.has_gpus else None,
        "cpus-per-task": job.cpus,
        "mem": None if job.gibibytes is None else f"{job.gibibytes}G",
        "time": job.request.time,
        "partition": job.request.queue,
        "open-mode": "append",
        "signal": f"{'B:USR1' if job.hosts > 1 else 'TERM'}@{job.end_seconds}",
    }
    lines = ["#!/bin/bash", *(f"# {line}" for line in job.describe()), "#SBATCH --requeue"]
    lines += [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    return "\n".join([*lines, "", *(_start_agents(job) if job.hosts > 1 else _start_workers(job))]) + "\n"


def _start_workers(job: ClusterJob) -> list[str]:
    """Return commands of a job on one node: the signal reaches polylane, whose exit code says what to do."""
    return [
        *_wrap("srun", f"--cpus-per-task={job.cpus}", *map(shlex.quote, job.command)),
        "code=$?",
        f"if [ $code -eq {job.requeue_code} ]; then {REQUEUE}; fi",
        "exit $code",
    ]


def _start_agents(job: ClusterJob) -> list[str]:
    """Return commands of a job on several nodes: one agent of torchrun on each, which passes signals on."""
    workers = f"--nnodes {job.hosts} --nproc-per-node {job.workers} --max-restarts {job.restarts}"
    meeting = '--rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID"'
    command = _wrap("    -m", "--", *map(shlex.quote, job.command))
    return [
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 12000))  # another one for each job",
        "",
        "# Before the time is over, Slurm sends USR1 to this script, which sends TERM to the workers.",
        'stop() { stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"; }',
        "trap stop USR1",
        "",
        f"srun --cpus-per-task={job.cpus} torchrun {workers} --shutdown-timeout {job.grace} \\",
        f"    {meeting} \\",
        *command[:-1],
        f"{command[-1]} &",
        "wait $!  # ends early when the trap runs",
        "wait $!",
        "code=$?",
        "# torchrun's code is 0 for a training that was done just then, and 1 for one with a checkpoint.",
        f'if [ -n "$stopped" ] && [ $code -ne 0 ]; then {REQUEUE}; fi',
        "exit $code",
    ]


def _wrap(*words: str) -> list[str]:
    """Return the lines of a shell's command, each but the last one with a backslash at its end."""
    parts = [words[0]]  # an option with its value
    for option, word in itertools.pairwise(words):
        if option.startswith("--") and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) < WIDTH - 2:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {part}")
    return lines
