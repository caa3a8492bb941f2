"""Inputs by number: each is a function of the seed and of its number alone, so that one of them can be made again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import yaml

from tests.fuzzing.checkpoints import edited_checkpoint, mutated_checkpoint, trained_checkpoint
from tests.fuzzing.isolation import FuzzInput
from tests.fuzzing.mutations import mutate_data, mutate_text, odd_number, odd_word
from tests.fuzzing.recipes import WHOLE, broken_recipe

TINY = "".join(WHOLE.values())

STAGES = """\
stages:
  first: {forward: 2, backward: 4}
  left: {after: [first], weight: 1}
  right: {after: [first]}
  last: {after: [left, right], forward: 1.5}
"""

CLUSTER = """\
polylane: 1
hosts:
- {count: 2, devices: 2, device: a100-80g, link: nvlink-3, rack: r0, site: paris, speed: 0.9, price: 1.5}
- count: 1
  devices: 1
  rack: r1
  site: rome
  device:
    kind: mine
    memory: 80 GB
    flops: {float32: 20 TFLOP/s, bfloat16: 300 TFLOP/s}
    bandwidth: 2 TB/s
    overhead: 5 us
links:
  hosts: {preset: ethernet-10g, latency: 1 ms}
  racks: {bandwidth: 25 GB/s, latency: 5us}
  sites: internet-1g
speeds: {3: 0.8}
"""

PLAN = """\
polylane: 1
stages:
- nodes: [0/linear, 1/tanh]
  devices: [0, 1]
  mesh: {data: 2}
- nodes: [2/linear, loss/cross_entropy_loss]
  devices: [2, 3]
  mesh: {tensor: 2}
  placements:
    2.weight: {tensor: shard(0)}
  recompute: full
schedule: 1f1b
microbatches: 4
replicas: split
sync: {kind: all_reduce, every: 1, shard: gradients}
precision: float32
"""

SCHEDULES = ("1f1b", "afab", "naive", "interleaved", "zb-h1", "zb-h2", "zb-v", "pipedream", "pipedream-2bw", "auto")
MORE = "per_sample: [model]\n"

KEYS = {
    "data": ("1", "2", "4"),
    "pipeline": ("1", "2", "3"),
    "tensor": ("1", "2"),
    "sequence": ("2",),
    "microbatches": ("1", "2", "4", "12"),
    "chunks": ("1", "2"),
    "schedule": SCHEDULES,
    "replicas": ("split", "round-robin"),
    "vertical_sync": ("yes", "no"),
    "precision": ("float32", "bfloat16"),
    "recompute": ("full", "none", "selective", "budget:1MB", "0:full", "0:full+default:none"),
    "every": ("1", "4"),
    "warmup": ("2",),
    "outer": ("0.7:0.9", "1"),
    "shard": ("none", "optimizer", "gradients", "parameters"),
    "within": ("2",),
    "wire": ("same", "bfloat16", "float16"),
    "compress": ("powersgd:4", "top_k:0.1", "powersgd:2:9"),
    "servers": ("1", "2"),
    "dedicated": ("yes", "no"),
    "staleness": ("0", "any", "3"),
    "per_sample": ("model", "0+1"),
    "compile": ("no",),
}
OPTIONS = {
    "--batch": ("1", "12", "64"),
    "--seed": ("0", "7"),
    "--steps": ("1",),
    "--workers": ("1", "2"),
    "--clip-norm": ("1.0",),
    "--set": ("width=4", "model.width=4", "lr=0.5"),
}


def make_input(seed: int, number: int) -> FuzzInput:
    """Return an input by its number."""
    draw = random.Random(f"{seed}/{number}")
    kinds, weights = zip(*KINDS.items(), strict=True)
    kind = draw.choices(kinds, weights)[0]
    made = kind(draw)
    name, files = f"{seed}/{number} {kind.__name__[5:]}", {"tiny.py": TINY.encode(), **made.files}
    return FuzzInput(name, made.arguments, files, made.code)


def _input(*arguments: str, **files: Any) -> FuzzInput:
    return FuzzInput("", arguments, {name.replace("_yaml", ".yaml"): content for name, content in files.items()})


def _mutated(draw: random.Random, text: str) -> bytes:
    """A file as it is, or with what it says changed, or its bytes, or both."""
    kind = draw.random()
    if kind < 0.6:
        data = mutate_data(draw, yaml.safe_load(text))
        flow = draw.choice((None, True, False))
        text = yaml.safe_dump(data, sort_keys=False, default_flow_style=flow, allow_unicode=True)
    return text.encode() if kind < 0.5 or kind > 0.97 else mutate_text(draw, text)


def draw_stages_file(draw: random.Random) -> FuzzInput:
    """A file of stages that branch, drawn."""
    schedule = draw.choice(("1f1b", "afab", "zb-h1", "auto", "interleaved", "pipedream"))
    words = ("lanes", schedule, "--stages", "f.yaml", "--microbatches", draw.choice(("2", "5")))
    return _input(*words, f_yaml=_mutated(draw, STAGES))


def draw_lanes_options(draw: random.Random) -> FuzzInput:
    """Options of lanes, of which some are odd."""
    schedule = draw.choice(KEYS["schedule"])
    words = ["lanes", schedule, "--stages", draw.choice(("1", "2", "4"))]
    words += ["--microbatches", draw.choice(("1", "3", "8"))]
    known = {"--forward": "1,2", "--backward": "2", "--weight": "1", "--hop": "0.5", "--halving": "0.1"}
    known |= {"--replicas": "2,1", "--chunks": "2", "--batches": "3", "--live": "2", "--stages": "2"}
    known |= {"--microbatches": "4"}
    for _ in range(draw.randrange(1, 4)):
        option = draw.choice(list(known))
        kind = draw.random()
        words += [option, known[option] if kind < 0.4 else odd_number(draw) if kind < 0.8 else odd_word(draw)]
    more = ([], [], ["--json"], ["--compare"], ["--vertical-sync"], ["--svg", "x/y.svg"], ["--html", odd_word(draw)])
    words += draw.choice(more)
    return _input(*words)


def draw_plan_line(draw: random.Random) -> FuzzInput:
    """A plan in one line, whose keys may exclude each other, with odd values."""
    command = draw.choice(("inspect", "inspect", "simulate"))
    more = ("--cluster", "4:v100") if command == "simulate" else ()
    return _input(command, "tiny.py", "--plan", _plan_line(draw), "--batch", "12", *more)


def _plan_line(draw: random.Random) -> str:
    pieces = []
    for key in draw.sample(list(KEYS), draw.choice((1, 2, 2, 3, 5))):
        kind = draw.random()
        value = draw.choice(KEYS[key]) if kind < 0.8 else odd_number(draw) if kind < 0.9 else odd_word(draw)
        pieces.append(f"{key}={value}" if draw.random() < 0.97 else odd_word(draw))
    line = ",".join(pieces)
    if draw.random() < 0.1:
        known = ("data=2", "tensor=2", "1", "data=2,tensor=2", "", odd_word(draw))
        meshes = [draw.choice(known) for _ in range(draw.randrange(4))]
        line = f"[{' | '.join(meshes)}],{line}"
    return line if draw.random() < 0.9 else mutate_text(draw, line).decode("utf-8", "surrogateescape").replace("\0", "")


def draw_plan_file(draw: random.Random) -> FuzzInput:
    """A plan file."""
    command = draw.choice(("inspect", "inspect", "simulate", "train", "verify"))
    more = {"simulate": ("--cluster", "4:v100"), "train": ("--steps", "1")}.get(command, ())
    return _input(
        command,
        "tiny.py",
        "--plan",
        "f.yaml",
        "--batch",
        "12",
        *more,
        f_yaml=_mutated(draw, PLAN + draw.choice(("", "", MORE))),
    )


def draw_cluster_file(draw: random.Random) -> FuzzInput:
    """A cluster file."""
    plan = draw.choice(("data=1", "data=2", "pipeline=2", "data=5"))
    words = ("simulate", "tiny.py", "--cluster", "f.yaml", "--plan", plan, "--batch", "12")
    return _input(*words, f_yaml=_mutated(draw, CLUSTER))


def draw_cluster_line(draw: random.Random) -> FuzzInput:
    """A cluster in one line, stragglers and the like."""
    known = ("2:v100", "1x2:a100-80g", "2x1x1:v100,sites=internet-1g", "2x2:v100,hosts=ethernet-10g,cores=3")
    line = draw.choice(known)
    if draw.random() < 0.7:
        line = mutate_text(draw, line).decode("utf-8", "surrogateescape").replace("\0", "")
    words = ["simulate", "tiny.py", "--cluster", line, "--plan", draw.choice(("data=1", "data=2")), "--batch", "12"]
    for options in (("--slow", "--dtype", "--schedule"), ("--every", "--chunks", "--recompute", "--batch")):
        if draw.random() < 0.5:
            words += [draw.choice(options), draw.choice((odd_number, odd_word))(draw)]
    if draw.random() < 0.2:
        words += ["--slow", f"{odd_number(draw)}={odd_number(draw)}"]
    return _input(*words)


def draw_search(draw: random.Random) -> FuzzInput:
    """Options of the search for plans."""
    words = ["plan", "tiny.py", "--cluster", "2:v100", "--batch", draw.choice(("1", "12", odd_number(draw)))]
    for option in draw.sample(("--plan", "--memory", "--top", "--reserve", "--workers", "-o"), 2):
        odd = draw.choice((odd_number, odd_word))(draw)
        words += [option, _plan_line(draw) if option == "--plan" else odd]
    return _input(*words)


def draw_recipe(draw: random.Random) -> FuzzInput:
    """A recipe with broken functions."""
    simulated = ("simulate", "--cluster", "1:v100", "--plan", "data=1")
    command = draw.choice((("inspect",), ("inspect", "--plan", "data=2"), simulated))
    made = _input(command[0], "odd.py", *command[1:], "--batch", "4")
    made.files["odd.py"] = broken_recipe(draw).encode()
    return made


def draw_recipe_bytes(draw: random.Random) -> FuzzInput:
    """A file that is hardly Python, or a name that is no file."""
    if draw.random() < 0.3:
        names = (odd_word(draw), "n" * 300 + ".py", "a/b/c.py", ".", "..", "f", "os.path", "json")
        return _input("inspect", draw.choice(names), f=None)
    made = _input("inspect", "odd.py")
    # Mutated text might well be a program that does harm: its code is compiled, and never run.
    made.files["odd.py"] = b"raise SystemExit(3)\n" + mutate_text(draw, TINY)
    return made


def draw_settings(draw: random.Random) -> FuzzInput:
    """Settings, seeds and numbers of the commands."""
    words = ["inspect", "tiny.py"]
    for _ in range(draw.randrange(1, 3)):
        option = draw.choice(("--batch", "--set"))
        value = draw.choice(OPTIONS[option])
        if draw.random() < 0.8:
            word, number = odd_word(draw), odd_number(draw)
            value = draw.choice((word, number, number, f"width={word}", f"lr={number}", f"{word}=1", "samples=0"))
        words += [option, value]
    return _input(*words)


def draw_run_folder(draw: random.Random) -> FuzzInput:
    """A run's folder where something is in the way."""
    where = draw.choice(("run/a", "f", "f/g", "n" * 300, "/dev/null", "/proc/x", odd_word(draw), "a/" * 300 + "b"))
    made = _input("train", "tiny.py", "--steps", "1", "--batch", "12", "--plan", "data=1", "--run", where)
    made.files["f"] = b"a file"
    for name in draw.sample(("model.safetensors", "plan.yaml", "metrics.jsonl", "timeline.json", "unfinished"), 2):
        # A folder in a file's place, or a file in a folder's.
        made.files[f"run/a/{name}"] = draw.choice((None, b"", b"\xff" * 9))
    return made


def draw_checkpoint(draw: random.Random) -> FuzzInput:
    """A checkpoint that was changed, and is read whole."""
    made = _input("export", draw.choice(("c/step-00000003", "c", "c", ".")), draw.choice(("out", "deep/out", "c")))
    made.files.update(mutated_checkpoint(draw))
    return made


def draw_resumed(draw: random.Random) -> FuzzInput:
    """A training that is to go on from a checkpoint that was edited."""
    words = ("--plan", "data=1", "--batch", "12", "--steps", "2", "--resume", "c", "--run", "run/a")
    made = _input("train", "tiny.py", *words)
    made.files.update(edited_checkpoint(draw, trained_checkpoint(TINY)))
    return made


def draw_words(draw: random.Random) -> FuzzInput:
    """A command line of odd words."""
    command = draw.choice(("train", "verify", "inspect", "simulate", "plan", "lanes", "probe", odd_word(draw)))
    known = (*OPTIONS, "--plan", "--cluster", "--json")
    words = [draw.choice((draw.choice(known), odd_word(draw))) for _ in range(draw.randrange(5))]
    return _input(command, draw.choice(("missing.py", odd_word(draw))), *words)


# How often each kind comes: what is cheap, and what others hand on, most often.
KINDS: dict[Callable[[random.Random], FuzzInput], int] = {
    draw_stages_file: 16,
    draw_lanes_options: 8,
    draw_plan_line: 16,
    draw_plan_file: 16,
    draw_cluster_file: 16,
    draw_cluster_line: 8,
    draw_search: 2,
    draw_recipe: 12,
    draw_recipe_bytes: 3,
    draw_settings: 5,
    draw_run_folder: 2,
    draw_words: 6,
    draw_checkpoint: 12,
    draw_resumed: 3,
}
CHEAP = {draw_stages_file, draw_lanes_options, draw_plan_file, draw_cluster_file, draw_words, draw_checkpoint}
