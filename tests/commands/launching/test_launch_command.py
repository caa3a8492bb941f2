"""polylane launch: what it prints is what launchers take, and starts the plan's workers with the user's command."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from polylane.checkpoint.manifest import ITEM_BYTES, format_manifest, read_manifest
from polylane.cli import app
from polylane.commands.launching.launch_command import LAUNCHERS
from polylane.commands.requests import WorkerRange
from polylane.runtime.workers.launch_environment import node_options
from tests.cli.tiny_recipe import RECIPE, call, execute

CRDS = Path(__file__).parent / "crds"
SCRIPT = "import polylane\nmodel, optimizer = polylane.prepare(model, optimizer)\n"
# Words that a shell, YAML or Kubernetes would change where they are not quoted.
ODD = "a b'c\"d $(HOME) $$(HOME) $$$x $HOME # \\ é *"
IMAGE = ("--image", "registry/image:1")
NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Printed:
    """What was printed for a launcher: its text, and as JSON."""

    text: str
    facts: dict[str, Any]


def launch(launcher: str, *words: str, program: str = "tiny.py") -> Printed:
    image = IMAGE if launcher in ("kubernetes", "jobset") else ()
    line = ["launch", program, "--on", launcher, *image, *words]
    plain = call(*line)
    assert plain.exit_code == 0, plain.output + str(plain.exception)
    at = line.index("--") if "--" in line else len(line)
    as_json = call(*line[:at], "--json", *line[at:])
    facts = json.loads(as_json.stdout)
    assert facts["text"] == plain.stdout
    return Printed(plain.stdout, facts)


def run_in_bash(script: str, folder: Path, **stubs: str) -> subprocess.Popen[str]:
    """Start a shell script with programs that are shell scripts as well."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in stubs.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    (folder / "job").write_text(script)
    (folder / "job").chmod(stat.S_IRWXU)
    return subprocess.Popen(["bash", str(folder / "job")], env=environment, text=True, cwd=folder)


PRINT_WORDS = 'printf "%s\\0" "$@" > words'


def read_words(printed: Printed, launcher: str, folder: Path) -> list[str]:
    """The words of polylane's command as the launcher's shell or container has them, without the program's name."""
    if launcher in ("slurm", "skypilot"):
        text = printed.text if launcher == "slurm" else yaml.safe_load(printed.text)["run"]
        stubs = {"srun": PRINT_WORDS, "polylane": PRINT_WORDS, "scontrol": "echo host-a"}
        assert run_in_bash(text, folder, **stubs).wait(20) == 0
        words = (folder / "words").read_text().split("\0")[:-1]
        return words[words.index("polylane") + 1 :] if launcher == "slurm" else words
    container = find_pod(printed)["containers"][0]
    data = yaml.safe_load(printed.text)
    command = data["spec"]["trainer"]["command"] if data["kind"] == "TrainJob" else container["command"]
    assert command[0] == "polylane"
    return [expand_variables(word) for word in command[1:]]


def expand_variables(word: str) -> str:
    """What Kubernetes makes of a word, where the pod has a variable of every name."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda match: "$" if match[1] == "$" else "VALUE", word)


def find_pod(printed: Printed) -> dict[str, Any]:
    """The pod's specification in a manifest."""
    data = yaml.safe_load(printed.text)
    spec = data["spec"]
    if data["kind"] == "TrainJob":
        spec = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    if data["kind"] != "Job":
        (job,) = spec["replicatedJobs"]
        spec = job["template"]["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    return pod


def read_schema(kind: str) -> dict[str, Any]:
    """The schema of a kind of manifest; a Job's is in that of a JobSet, whose jobs are made of it."""
    name = "trainjobs" if kind == "TrainJob" else "jobsets"
    schema: dict[str, Any] = json.loads((CRDS / f"{name}.json").read_text())
    if kind == "Job":
        job_set = schema["properties"]["spec"]["properties"]["replicatedJobs"]["items"]
        schema["properties"]["spec"] = job_set["properties"]["template"]["properties"]["spec"]
    return schema


def parse_command(words: list[str]) -> dict[str, Any]:
    """The options that polylane's own command line reads in the words of its command."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parsed: dict[str, Any] = commands[words[0]].make_context(words[0], words[1:]).params
    return parsed


# ---- what launchers take ---------------------------------------------------------------------------------------------

KINDS = [("kubernetes", 1, "Job"), ("kubernetes", 2, "TrainJob"), ("jobset", 1, "JobSet"), ("jobset", 2, "JobSet")]


@pytest.mark.parametrize("device", ["cpu", "gpu", "mi300x"])
@pytest.mark.parametrize(("launcher", "hosts", "kind"), KINDS)
def test_manifests_are_valid_and_have_the_plan_s_devices(launcher: str, hosts: int, kind: str, device: str) -> None:
    printed = launch(launcher, "--hosts", str(hosts), "--plan", "data=8", "--device", device, "--queue", "train")
    data, pod = yaml.safe_load(printed.text), find_pod(printed)
    assert data["kind"] == kind
    jsonschema.validate(data, read_schema(kind), jsonschema.Draft202012Validator)
    assert data["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "train"}
    trainer = data["spec"].get("trainer", {})
    resources = trainer.get("resourcesPerNode") or pod["containers"][0]["resources"]
    gpus = {name: count for name, count in resources.get("limits", {}).items() if name.endswith("/gpu")}
    vendor = "amd" if device == "mi300x" else "nvidia"
    assert gpus == ({} if device == "cpu" else {f"{vendor}.com/gpu": 8 // hosts})
    assert resources["requests"]["cpu"] == 8 // hosts * (1 if device == "cpu" else 8)
    assert trainer.get("numNodes", hosts) == hosts and trainer.get("numProcPerNode", 8 // hosts) == 8 // hosts
    assert printed.facts["hosts"] * printed.facts["workers_per_host"] == 8


@pytest.mark.parametrize(("launcher", "hosts", "kind"), KINDS)
def test_pods_have_time_to_save_and_shared_memory(launcher: str, hosts: int, kind: str) -> None:
    printed = launch(launcher, "--hosts", str(hosts), "--plan", "data=8")
    pod, facts = find_pod(printed), printed.facts
    assert facts["save_seconds"] < facts["grace_seconds"] < pod["terminationGracePeriodSeconds"]
    assert {"name": "memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/runs": "runs", "/dev/shm": "memory"}
    assert "--grace" in facts["command"] and facts["command"][facts["command"].index("--run") + 1] == "/runs/tiny"


@pytest.mark.parametrize(("launcher", "hosts", "kind"), [row for row in KINDS if row[2] != "TrainJob"])
def test_exit_codes_say_what_follows(launcher: str, hosts: int, kind: str) -> None:
    printed = launch(launcher, "--hosts", str(hosts), "--plan", "data=8", "--max-restarts", "5")
    spec = yaml.safe_load(printed.text)["spec"]
    job = spec if kind == "Job" else spec["replicatedJobs"][0]["template"]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert actions == {2: "FailJob", 75: "Ignore"}
    assert parse_command(printed.facts["command"][1:])["requeue_code"] == 75
    containers = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    assert containers == {container["name"] for container in find_pod(printed)["containers"]}
    assert find_pod(printed)["restartPolicy"] == "Never"  # which the policy requires
    restarts = job["backoffLimit"] if kind == "Job" else spec["failurePolicy"]["maxRestarts"]
    assert restarts == 5


def test_the_pods_of_a_job_set_become_agents_that_meet_at_the_first() -> None:
    printed = launch("jobset", "--hosts", "3", "--plan", "data=6", "--name", "big")
    job_set = yaml.safe_load(printed.text)
    variables = {row["name"]: row.get("value") for row in find_pod(printed)["containers"][0]["env"]}
    assert node_options(variables) == []  # torchrun reads them itself
    assert (variables["PET_NNODES"], variables["PET_NPROC_PER_NODE"]) == ("3", "2")
    (job,) = job_set["spec"]["replicatedJobs"]
    assert variables["PET_MASTER_ADDR"] == f"big-{job['name']}-0-0.big" and job_set["spec"]["network"]
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 3


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "a100-80g"])
def test_a_task_of_skypilot_starts_the_plan_s_workers(hosts: int, device: str) -> None:
    printed = launch("skypilot", "--hosts", str(hosts), "--plan", "data=4", "--device", device)
    task = yaml.safe_load(printed.text)
    assert task["num_nodes"] == hosts and set(task["volumes"]) == {"/runs"}
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    accelerator, _, count = task["resources"].get("accelerators", "").partition(":")
    assert (accelerator, count) == (("", "") if device == "cpu" else ("A100-80GB", str(4 // hosts)))
    said = {"SKYPILOT_NUM_NODES": str(hosts), "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
    options = node_options({**said, "SKYPILOT_NUM_GPUS_PER_NODE": count or "0", **task.get("envs", {})})
    workers = parse_command(printed.facts["command"][1:])["workers"]
    if hosts == 1:
        assert options is None and workers == WorkerRange(None, 4)
    else:
        assert options is not None and options[-1] == "2" and workers is None


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_is_the_user_s(launcher: str, hosts: int, folder: Path) -> None:
    """Word for word, whatever the words; what it leaves open is filled in."""
    words = ["--plan", "data=4,shard=optimizer", "--run", "/shared/a run", "--batch", "32", "--log", ODD]
    printed = launch(launcher, "--device", "cpu", "--hosts", str(hosts), *words, "--set", "width=12")
    command = read_words(printed, launcher, folder)
    assert command == printed.facts["command"][1:] and command[:2] == ["train", "tiny.py"]
    parsed = parse_command(command)
    assert (parsed["plan"], parsed["run"], parsed["batch"]) == ("data=4,shard=optimizer", Path("/shared/a run"), "32")
    assert (parsed["log"], parsed["settings"], parsed["resume"]) == (ODD, ["width=12"], "auto")
    assert parsed["save_every"] == "10m" and parsed["grace"] == printed.facts["grace_seconds"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_command_of_a_script(launcher: str, folder: Path) -> None:
    words = ["--device", "cpu", "--plan", "data=2", "--hosts", "2", "--save-every", "50", "--resume", "/old"]
    printed = launch(launcher, *words, "--", "--on", ODD, program="train.py")
    command = read_words(printed, launcher, folder)
    parsed = parse_command(command)
    assert command[:2] == ["run", "train.py"] and parsed["arguments"] == ["--on", ODD]
    assert (parsed["save_every"], parsed["resume"]) == ("50", "/old") and command.count("--save-every") == 1
    assert printed.facts["state_bytes"] is None


PLAIN = re.compile(r"(--?|/)?[A-Za-z][A-Za-z0-9_./=-]*")
# What some reader of YAML 1.1 or 1.2 takes for no text, where it is not in quotes.
NO_TEXT = ["y", "N", "on", "Off", "yes", "null", "~", "", "1e3", "1e-3", "1.5e3", "0o17", "0x1f", "0b1", "1_000"]
NO_TEXT += ["12:30", ".5", "+1", "-.inf", ".NaN", "2026-01-01", "<<", "=", "# a", "*a", "&a", "!a", " a", "a: b"]
NO_TEXT += ["\u2028", "\x85", "\ufeff", "$$"]


@pytest.mark.parametrize(("launcher", "hosts", "kind"), KINDS)
def test_text_is_text_for_every_reader_of_yaml(launcher: str, hosts: int, kind: str, folder: Path) -> None:
    words = ["--plan", "data=4", "--hosts", str(hosts), "--name", "y", "--queue", "1e3", "--volume", "0o17"]
    words += ["--run", "/1e3/n", "--save-every", "10m", "--", *NO_TEXT, "a\nb"]
    printed = launch(launcher, *words, program="train.py")
    assert read_words(printed, launcher, folder)[-len(NO_TEXT) - 1 :] == [*NO_TEXT, "a\nb"]
    texts = [node for node in list_scalars(yaml.compose(printed.text)) if node.tag.endswith(":str")]
    assert {"y", "1e3", "0o17", "/1e3/n", "/1e3", "Memory"} <= {node.value for node in texts}
    for node in texts:
        is_plain = PLAIN.fullmatch(node.value) and node.value.lower() not in NO_TEXT
        assert node.style is not None or is_plain, node.value


def list_scalars(node: yaml.Node) -> list[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        return [node]
    parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return [scalar for part in parts for scalar in list_scalars(part)]


# ---- Slurm's scripts -------------------------------------------------------------------------------------------------


def read_options(text: str) -> dict[str, str]:
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)


def test_a_batch_script_asks_for_the_plan_s_devices() -> None:
    gpus = launch(
        "slurm", "--hosts", "2", "--plan", "data=8", "--device", "gpu", "--time", "2-00:00:00", "--queue", "a,b_2"
    )
    options = read_options(gpus.text)
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "4")
    assert (options["cpus-per-task"], options["time"], options["partition"]) == ("32", "2-00:00:00", "a,b_2")
    assert options["requeue"] == "" and options["open-mode"] == "append" and int(options["mem"][:-1]) >= 4 * 6
    assert "--nnodes 2 --nproc-per-node 4 --max-restarts 3" in gpus.text
    assert "srun --cpus-per-task=32 torchrun" in gpus.text  # since Slurm 22.05 srun does not take over the script's
    cores = read_options(launch("slurm", "--plan", "data=8", "--device", "cpu", "--memory", "5 GB").text)
    assert (cores["nodes"], cores["cpus-per-task"], cores["mem"]) == ("1", "8", "5G") and "gpus-per-node" not in cores


@pytest.mark.parametrize("time_limit", ["0", "4", "3:01", "0:4:0", "1-0"])
def test_a_time_limit_that_leaves_time_before_the_signal(time_limit: str) -> None:
    assert read_options(launch("slurm", "--plan", "data=2", "--time", time_limit).text)["time"] == time_limit


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (75, True), (2, False)])
def test_a_job_on_one_node_is_requeued_by_its_exit_code(code: int, is_requeued: bool, folder: Path) -> None:
    text = launch("slurm", "--plan", "data=2").text
    script = run_in_bash(text, folder, srun=f"exit {code}", scontrol='echo "$@" >> requeued')
    assert script.wait(20) == code
    assert (folder / "requeued").exists() == is_requeued


def test_a_job_on_several_nodes_passes_the_signal_on_and_is_requeued(folder: Path) -> None:
    text = launch("slurm", "--plan", "data=4", "--hosts", "2").text
    stubs = {
        "srun": 'trap "exit 1" TERM; echo $$ > task; while true; do sleep 0.05; done',
        "scancel": 'echo "$@" > cancelled; kill -TERM $(cat task)',
        "scontrol": '[ "$1" = show ] && echo host-a || echo "$@" > requeued',
    }
    script = run_in_bash(text, folder, **stubs)
    deadline = time.monotonic() + 20
    while not (folder / "task").exists() or not (folder / "task").read_text().strip():
        assert script.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    script.send_signal(10)  # SIGUSR1
    assert script.wait(20) == 1
    assert (folder / "cancelled").read_text().split() == ["--signal=TERM", "7"]
    assert (folder / "requeued").read_text().split() == ["requeue", "7"]


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_on_several_nodes_that_ends_by_itself_is_not_requeued(code: int, folder: Path) -> None:
    stubs = {"srun": f"exit {code}", "scontrol": '[ "$1" = show ] && echo host-a || echo "$@" > requeued'}
    assert run_in_bash(launch("slurm", "--plan", "data=4", "--hosts", "2").text, folder, **stubs).wait(20) == code
    assert not (folder / "requeued").exists()


# ---- what a checkpoint has -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data=2", "data=2,every=2", "pipeline=2", "data=2,shard=parameters"])
def test_the_time_to_save_is_that_of_the_run_s_checkpoint(plan: str, folder: Path) -> None:
    """And the state that is predicted from the recipe is the one that is saved."""
    predicted = launch("slurm", "--plan", plan, "--run", "run/a").facts
    execute(folder, f"train tiny.py --plan {plan} --run run/a --steps 2 --batch 4 --save-every 1")
    checkpoint = sorted((folder / "run/a/checkpoints").iterdir())[-1]
    manifest = read_manifest(checkpoint)
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    measured = launch("slurm", "--plan", plan, "--run", "run/a")
    assert measured.facts["state_bytes"] == size and "as step 2 of this run took" in measured.text
    assert 0 < measured.facts["save_seconds"] < 60
    tensors = {name: math.prod(t.shape) * ITEM_BYTES[t.dtype] for name, t in manifest.tensors.items()}
    saved = [number for name, number in tensors.items() if name.startswith(("model/", "optimizer/"))]
    assert predicted["state_bytes"] == sum(saved)  # the rest are states of random generators, and names
    (checkpoint / "manifest.json").write_text(format_manifest(manifest.model_copy(update={"write_seconds": None})))
    earlier = launch("slurm", "--plan", plan, "--run", "run/a")  # as of a version that did not measure it
    assert earlier.facts["save_seconds"] == size / 200e6


def test_more_state_has_more_time() -> None:
    small, large = (launch("slurm", "--plan", "data=2", "--set", f"width={width}").facts for width in (8, 20_000))
    assert large["state_bytes"] > 10**9 and large["save_seconds"] == pytest.approx(large["state_bytes"] / 200e6)
    assert large["grace_seconds"] - small["grace_seconds"] >= large["save_seconds"]


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("/runs/My_Model.v2", "my-model-v2"),
        ("/runs/-7--x-", "x"),
        (f"/runs/{'a-' * 60}", None),
    ],
)
def test_names_are_labels_of_dns(run: str, name: str | None) -> None:
    data = yaml.safe_load(launch("jobset", "--plan", "data=2", "--hosts", "2", "--run", run).text)
    found = data["metadata"]["name"]
    assert NAME.fullmatch(found) and len(f"{found}-node-0-9999-abcde") <= 63
    assert name in (None, found)


# ---- mistakes --------------------------------------------------------------------------------------------------------

JOB_SET = "--on jobset --plan data=8 --image i"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--on slurm --hosts 3 --plan data=8",
            "--hosts 3: the plan takes 8 workers, .* take --hosts 2, or another plan",
        ),
        ("--on slurm --plan auto", r"--plan auto says no number of workers: let polylane plan tiny.py"),
        ("--on slurm --plan data=x", "data"),
        (
            "--on slurm --plan data=8 --image x",
            "--image is for --on kubernetes or jobset or skypilot, and not for slurm",
        ),
        (f"{JOB_SET} --time 1:00:00", "--time is for --on slurm, and not for jobset"),
        ("--on skypilot --plan data=2 --device cpu --queue x", "--queue is for --on slurm or kubernetes or jobset"),
        (
            "--on slurm --plan data=8 --time 1",
            "--time 1: is 60 s, .* comes 61 s before the end: give at least 4 minutes",
        ),
        ("--on slurm --plan data=8 --time 0-0:5 --grace 600", "--time 0-0:5: is 300 s, .* at least 13 minutes"),
        (f"{JOB_SET} --run /dev/shm/a", "--run /dev/shm/a: name a folder on the volume, such as /runs/a"),
        (f"{JOB_SET} --run /a:b/c", "--run /a:b/c: a folder of a container has no colon"),
        (f"{JOB_SET} --queue {'a' * 64}", "--queue 'a+': give a name of .* at most 63"),
        (f"{JOB_SET} --queue a,b", "--queue 'a,b': give a name of"),
        ("--on slurm --plan data=8 --queue a,", "--queue 'a,': give a partition, or several as a,b"),
        (f"{JOB_SET} --volume Runs_1", "--volume 'Runs_1': give a claim's name, of lower-case letters"),
        ("--on jobset --plan data=8 --image ' '", "--image ' ': give the name of an image, which has no blanks"),
        ("--on skypilot --plan data=8 --device cpu --image 'x y'", "--image 'x y': give the name of an image"),
        (f"{JOB_SET} --run /runs/模型", "'模型' cannot be the job's name, .*: give one with --name"),
        ("--on slurm --plan data=8 --run runs/modèle", "'modèle' cannot be the job's name"),
        ("--on slurm --plan data=8 --resume none", "--resume: checkpoint none: there is no such folder; if the"),
        ("--on slurm --plan data=8 --batch 0", "--batch"),
        ("--on slurm --plan data=8 --save-every never", "--save-every never: give a number of steps"),
        ("--on slurm --plan data=8 --time tomorrow", "--time 'tomorrow': give a time as Slurm reads it"),
        ("--on jobset --plan data=8", "--on jobset needs --image, the container's image with .* tiny.py"),
        (f"{JOB_SET} --name My_Job", "--name 'My_Job': give lower-case letters"),
        (f"{JOB_SET} --queue 'a b'", "--queue 'a b': give a name"),
        (f"{JOB_SET} --run a", "--run a: name a folder on the volume, such as /runs/a"),
        (f"{JOB_SET} --run /", "--run /: give the name of a folder"),
        (f"{JOB_SET} --run ../a", "--run ../a: name a folder on the volume"),
        ("--on slurm --plan data=8 --device h100", "--device h100: there is no such device, .* did you mean h100-80g"),
        ("--on skypilot --plan data=8 --device gpu", "--on skypilot needs the GPU's name"),
        ("--on slurm --plan data=8 --workers 8", "--workers: the plan says how many there are: leave it out"),
        ("--on slurm --plan data=8 --bacth 3", "No such option: --bacth"),
        ("--on slurm --plan data=8 --accumulate x", "--accumulate"),
        ("--on slurm --plan data=8 --memory much", '--memory takes a size, as in "30 GB"'),
        ("--on slurm --plan data=8 --grace 0", "--grace 0: saving a checkpoint takes .*: give more"),
        ("--on slurm --plan data=8 --set depht=3", "depht"),
        ("--on slurm --plan data=8 -- --epochs 3", "--epochs: tiny.py is a recipe, which takes --set NAME=VALUE"),
        ("--on slurm --hosts 2 --plan data=8 --requeue-code 3", "--requeue-code: on several hosts of Slurm"),
        (
            "--on slurm --plan data=8 --requeue-code 0",
            "--requeue-code 0: a run that is done ends with it, .* such as 75",
        ),
        (f"{JOB_SET} --requeue-code 1", "--requeue-code 1: a run whose worker failed ends with it"),
        ("--on skypilot --plan data=8 --device cpu --requeue-code 2", "--requeue-code 2: a run with wrong input ends"),
        (
            "--on skypilot --plan data=8 --device cpu --run runs/a",
            "--run runs/a: name a folder on the volume, .* /runs/a",
        ),
        ("--on slurm --plan data=8 --save-every 10q", "--save-every 10q: give a number of steps"),
        ("--on slurm --plan data=8 --hang-after -3", "--hang-after .*-3"),
        (f"{JOB_SET} --grace 200000", "--grace 200000: give seconds, from 0 to 86400"),
        ("--on slurm --plan data=8 --resume ''", "--resume '': give auto, or the path of a checkpoint"),
        ("--on slurm --plan data=8 --epochs 2 --steps 3", "--epochs and --steps exclude each other"),
        ("--on slurm --plan data=8 --clip-norm -1", "--clip-norm"),
        ("--on slurm --plan data=8 --early-stop nothing:x", "--early-stop"),
        (f"{JOB_SET} --on-hang restart", "--on-hang restart: --on jobset itself starts a run again .*: leave it out"),
        (
            "--on kubernetes --image i --hosts 2 --plan data=8 --max-restarts 1",
            "--max-restarts: the runtime of a Train",
        ),
    ],
)
def test_a_mistake_is_one_sentence(line: str, sentence: str) -> None:
    outcome = call("launch", "tiny.py", *shlex.split(line))
    assert outcome.exit_code == 2 and outcome.stdout == ""
    (told,) = outcome.stderr.splitlines()
    assert re.search(sentence, told), told


@pytest.mark.parametrize("words", ["--batch 32 tiny.py", "--batch=32 tiny.py", "--fast-dev-run tiny.py"])
def test_the_program_stands_before_options_of_other_commands(words: str) -> None:
    outcome = call("launch", *shlex.split(f"{words} --on slurm --plan data=2"))
    assert outcome.exit_code == 2 and outcome.stdout == ""
    assert outcome.stderr.startswith(f"polylane: {words.split()[0]}: the recipe or script stands first"), outcome.stderr


@pytest.mark.parametrize(("program", "line"), [("tiny.py", "--hang-after 5"), ("train.py", "--grace 90 -- --epochs 3")])
def test_a_node_of_slurm_may_restart_after_a_hang(program: str, line: str) -> None:
    """The run's own folder and restarts count where options are checked; a script's options are checked as well."""
    printed = launch("slurm", "--plan", "data=2", "--on-hang", "restart", *shlex.split(line), program=program)
    assert "--on-hang restart" in printed.text
    outcome = call("launch", program, "--on", "slurm", "--plan", "data=2", "--save-every", "10q")
    assert outcome.exit_code == 2 and "--save-every 10q: give" in outcome.stderr


def test_the_head_says_which_time_is_assumed() -> None:
    assumed = "(at most 30 s, which is assumed)"
    assert assumed in launch("slurm", "--plan", "data=2").text
    assert assumed not in launch("slurm", "--plan", "data=2", "--grace", "300").text


def test_a_program_that_is_not_there() -> None:
    for program in ("none.py", "no.such.module"):
        outcome = call("launch", program, "--on", "slurm", "--plan", "data=2")
        assert outcome.exit_code == 2 and len(outcome.stderr.splitlines()) == 1 and program in outcome.stderr
