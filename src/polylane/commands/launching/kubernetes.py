"""Kubernetes: a Job for one pod; for several a TrainJob of Kubeflow Trainer (2.2 and later), or a JobSet.

Every pod of several runs ``polylane``, which becomes torchrun's agent there: it reads ``PET_*``, which Kubeflow's
runtime sets and a JobSet is given here. Its exit code is that of the first worker that failed.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from polylane.commands.launching.cluster_job import PORT, WRONG_INPUT, ClusterJob

CONTAINER = "node"  # the name that Kubeflow's runtimes have for the job and for the container of a training
RUNTIME = "torch-distributed"  # comes with Kubeflow Trainer
SHORT = 72  # letters of a part of a manifest that is written in one line
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
# Text that is text without quotes, whichever version of YAML reads it: 1e3, 0o17, 12:30 and 10m begin with a digit, and
# y and no are true and false to some readers only. PyYAML's own rules for quotes are those of its own reader.
PLAIN = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null)$)(--?|/)?[a-z][a-z0-9_./=-]*", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """Writes what is short in one line, the words of a command as one list, and lines of a shell as they are.

    All other text is in quotes, unless it is ``PLAIN``.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        is_words = all(isinstance(item, str) for item in sequence)
        return super().represent_sequence(tag, sequence, is_words or _is_short(sequence))

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        return super().represent_mapping(tag, mapping, _is_short(mapping))

    def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> Any:
        return super().represent_scalar(tag, value, _choose_style(value) if tag.endswith(":str") else style)


def _choose_style(text: str) -> str | None:
    """Return how YAML is to write a text: plain (None), in quotes, or as lines."""
    if PLAIN.fullmatch(text):
        return None
    if not text.replace("\n", "").isprintable():  # some of these end lines, others are nowhere but in escapes
        return '"'
    return "|" if "\n" in text else "'"


def _is_short(data: Any) -> bool:
    return len(str(data)) <= SHORT


def dump_manifest(data: dict[str, Any], notes: list[str]) -> str:
    """Return a manifest as YAML, with notes as comments above."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return "".join(f"# {note}\n" for note in notes) + text


def write_kubernetes(job: ClusterJob) -> str:
    """Return a Job for one host, and a TrainJob for several."""
    if job.hosts > 1:
        note = f"The ClusterTrainingRuntime {RUNTIME} says how often pods are restarted."
        return dump_manifest(_build_train_job(job), [*job.describe(), note])
    spec = {"backoffLimit": job.restarts, **_build_job_spec(job, {})}
    return dump_manifest(_build_object(job, "batch/v1", "Job", spec), job.describe())


def write_job_set(job: ClusterJob) -> str:
    """Return a JobSet: the pods of one indexed Job, with a headless service at which they meet."""
    environment: dict[str, Any] = {}
    if job.hosts > 1:
        index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        environment = {
            "PET_NNODES": str(job.hosts),
            "PET_NPROC_PER_NODE": str(job.workers),
            "PET_NODE_RANK": index,
            "PET_MASTER_ADDR": f"{job.name}-{CONTAINER}-0-0.{job.name}",
            "PET_MASTER_PORT": str(PORT),
        }
    pods = {"parallelism": job.hosts, "completions": job.hosts, "completionMode": "Indexed", "backoffLimit": 0}
    # A pod that fails ends the Job, which is started again with all its pods; wrong input ends the JobSet.
    rule = {"name": "wrongInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.restarts, "rules": [rule]},
        "replicatedJobs": [
            {"name": CONTAINER, "replicas": 1, "template": {"spec": {**pods, **_build_job_spec(job, environment)}}}
        ],
    }
    return dump_manifest(_build_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec), job.describe())


def _build_train_job(job: ClusterJob) -> dict[str, Any]:
    """Return a TrainJob: its trainer, and a patch of the runtime's pods for what a trainer does not say."""
    container = _build_container(job)
    pod = {
        "terminationGracePeriodSeconds": job.end_seconds,
        "containers": [{"name": CONTAINER, "volumeMounts": container["volumeMounts"]}],
        "volumes": _list_volumes(job),
    }
    jobs = [{"name": CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}]
    trainer = {
        "image": job.request.image,
        "command": container["command"],
        "numNodes": job.hosts,
        "numProcPerNode": job.workers,
        "resourcesPerNode": container["resources"],
    }
    patch = {"manager": "polylane", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    spec = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch]}
    return _build_object(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def _build_object(job: ClusterJob, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {} if job.request.queue is None else {"labels": {QUEUE_LABEL: job.request.queue}}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name, **labels}, "spec": spec}


def _build_job_spec(job: ClusterJob, environment: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Job that say what its pods are, and what follows from their exit codes.

    Args:
        job: the training, and how many pods it has.
        environment: variables of the container: a value, or where the pod has it.
    """

    def rule(action: str, code: int) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [code]}}

    container = _build_container(job)
    if environment:
        container["env"] = [
            {"name": name, "value" if isinstance(value, str) else "valueFrom": value}
            for name, value in environment.items()
        ]
    return {
        "podFailurePolicy": {
            "rules": [
                rule("FailJob", WRONG_INPUT),
                rule("Ignore", job.requeue_code),  # starts again, and is not counted; so do pods that are evicted
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.end_seconds,
                "containers": [container],
                "volumes": _list_volumes(job),
            }
        },
    }


def _build_container(job: ClusterJob) -> dict[str, Any]:
    # A list of words and no shell: SIGTERM comes to polylane. Kubernetes expands $(NAME), and takes $$ for $.
    words = [word.replace("$", "$$") for word in job.command]
    requests: dict[str, Any] = {"cpu": job.cpus}
    if job.gibibytes is not None:
        requests["memory"] = f"{job.gibibytes}Gi"
    # Nobody says whose a "gpu" is; the names of AMD's devices begin so.
    vendor = "amd" if job.device.startswith("mi") else "nvidia"
    limits = {"limits": {f"{vendor}.com/gpu": job.workers}} if job.has_gpus else {}
    return {
        "name": CONTAINER,
        "image": job.request.image,
        "command": words,
        "resources": {**limits, "requests": requests},
        "volumeMounts": [{"name": "runs", "mountPath": job.mount}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


def _list_volumes(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the volume with the run's folder, and shared memory: a container's own has 64 MB."""
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.request.volume or "runs"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
