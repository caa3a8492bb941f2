"""Parts of the documentation that are written from the code: ``python -m tests.docs.generated_pages`` writes them."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from polylane.cli import app
from polylane.cli_groups import title_of
from polylane.cluster.catalogue import device_presets, link_presets, usual_links
from polylane.cluster.cluster import Hosts, Links
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.plan import sync
from polylane.plan.options import PlanOptions
from polylane.plan.spec import KEYS, Spec
from tests.docs.page_blocks import ROOT

REFERENCE = ROOT / "docs" / "reference"


def write_commands() -> str:
    """Return the page of all commands, from their own help."""
    line = [sys.executable, "-m", "typer", "polylane.cli", "utils", "docs", "--name", "polylane"]
    text = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    # What typer shows as a usage is no command that can be run, and its examples are lines of one paragraph.
    text = text.replace("```console\n$ ", "```text\n").replace("# `polylane`\n", "", 1)
    # The list of commands has their sentences whole, and the aligned lines of help are a block.
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        text = re.sub(rf"^\* `{name}`: .*", f"* `{name}`: {command.help.splitlines()[0]}", text, flags=re.MULTILINE)
        text = _add_titles(text, name, command)
    text = re.sub(r" <(?:str|path|list\[\w+\])>`", "`", text.replace("\b", ""))
    text = re.sub(r":\n\n+((?:  \S.*\n)+)", lambda match: f":\n\n```text\n{_unindent(match[1])}```\n", text)
    text = re.sub(r"\n+Examples?:\n((?:  .*\n)+)", lambda match: f"\n\n```text\n{_unindent(match[1])}```\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _add_titles(text: str, name: str, command: Any) -> str:
    """Return the page with the titles of a command's groups of options, each above its first option."""
    head, _, rest = text.partition(f"## `polylane {name}`")
    for title, parameters in itertools.groupby(command.params, title_of):
        if title not in ("Arguments", "Options"):
            option = re.escape(next(parameters).opts[0])
            rest = re.sub(rf"^(?=\* `{option}[ `])", f"\n**{title}**:\n\n", rest, count=1, flags=re.MULTILINE)
    return f"{head}## `polylane {name}`{rest}"


def _unindent(lines: str) -> str:
    return re.sub(r"^  ", "", lines, flags=re.MULTILINE)


# A plan in one line that has the key, for each of them.
PLAN_EXAMPLES = {
    "data": "data=4",
    "pipeline": "pipeline=2",
    "sequence": "sequence=2",
    "tensor": "tensor=2",
    "microbatches": "pipeline=2,microbatches=8",
    "chunks": "pipeline=2,chunks=2",
    "schedule": "pipeline=4,schedule=zb-h1",
    "replicas": "[data=2 | 1],replicas=round-robin",
    "vertical_sync": "pipeline=2,schedule=pipedream,vertical_sync=yes",
    "precision": "data=2,precision=bfloat16",
    "recompute": "pipeline=2,recompute=full",
    "per_sample": "data=2,per_sample=experts",
    "compile": "data=2,compile=yes",
    "shares": "data=3,shares=2:2:1",
    "every": "data=4,every=16",
    "warmup": "data=4,every=16,warmup=500",
    "outer": "data=4,every=16,outer=0.7:0.9",
    "shard": "data=4,shard=parameters",
    "within": "data=16,shard=parameters,within=8",
    "wire": "data=4,wire=bfloat16",
    "compress": "data=4,compress=powersgd:4",
    "servers": "data=4,servers=2",
    "dedicated": "data=4,servers=1,dedicated=yes",
    "staleness": "data=4,servers=2,staleness=3",
}


def write_plan_keys() -> str:
    """Return the tables of the keys of a plan, from the docstrings of what a plan says."""
    meanings = {**read_meanings(PlanOptions), **read_meanings(Spec)}
    lines = ["", "## Degrees, schedule, passes", "", "| key | default | example | meaning |", "|---|---|---|---|"]
    for key, row in KEYS.items():
        if row.in_lines:
            default = (
                "see there" if row.default is None else f"`{row.format(row.default)}`" if row.default != () else ""
            )
            # A bar would end the cell; the site shows the backslash that GitHub takes for it.
            example = PLAN_EXAMPLES[key].replace("|", "&#124;")
            example = f"<code>{example}</code>" if "&" in example else f"`{example}`"
            lines.append(f"| `{key}` | {default} | {example} | {meanings[key]} |")
    lines += ["", "## Synchronization of replicas", ""]
    lines += ["In a plan file these are keys of `sync:`, with `kind: parameter_server` where there are servers.", ""]
    lines += ["| key | values | default | example | meaning |", "|---|---|---|---|---|"]
    for key, text in read_meanings(sync.SyncOptions).items():
        if key in sync.KEYS:
            value = sync.SyncOptions.model_fields[key].default
            default = "" if value is None else "`no`" if value is False else f"`{value}`"
            lines.append(f"| `{key}` | {sync.WANTED[key]} | {default} | `{PLAN_EXAMPLES[key]}` | {text} |")
    return "\n".join(lines) + "\n\n"


def write_presets() -> str:
    """Return the tables of the devices and links that are known by name, and of the keys of a cluster file."""
    lines = [
        "",
        "## Devices by name",
        "",
        "| device | memory | bfloat16 | float16 | memory bandwidth | linked by | hosts by |",
    ]
    lines += ["|---|---:|---:|---:|---:|---|---|"]
    for name, figures in device_presets().items():
        memory = f"{figures['memory'] / 2**30:.3g} GiB"
        rates = " | ".join(f"{figures['flops'][dtype] / 1e12:.3g} TFLOP/s" for dtype in ("bfloat16", "float16"))
        usual = usual_links().get(name, {})
        links = " | ".join(f"`{usual[key]}`" if key in usual else "" for key in ("link", "hosts"))
        lines.append(f"| `{name}` | {memory} | {rates} | {figures['bandwidth'] / 1e9:.4g} GB/s | {links} |")
    lines += [
        "",
        "## Links by name",
        "",
        "| link | bandwidth of a device | of a host | latency |",
        "|---|---:|---:|---:|",
    ]
    for name, figures in link_presets().items():
        total = f"{figures['total'] / 1e9:.4g} GB/s" if figures.get("total") else ""
        rates = f"{figures['bandwidth'] / 1e9:.4g} GB/s | {total}"
        lines.append(f"| `{name}` | {rates} | {figures['latency'] * 1e6:.4g} µs |")
    for record, title in ((Hosts, "an entry of `hosts`"), (Links, "`links`"), (Device, "a device"), (Link, "a link")):
        lines += ["", f"## Keys of {title}", "", "| key | meaning |", "|---|---|"]
        keys: dict[str, list[str]] = {}
        for key, text in read_meanings(record).items():
            keys.setdefault(text, []).append(f"`{key}`")
        lines += [f"| {', '.join(names)} | {text} |" for text, names in keys.items()]
    return "\n".join(lines) + "\n\n"


def read_meanings(record: type) -> dict[str, str]:
    """Return what the docstring of a class says of its attributes, by name, in Markdown."""
    attributes = (inspect.getdoc(record) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    texts = {names: " ".join(text.split()).replace("``", "`").replace("](docs/", "](../") for names, text in found}
    # What is None in Python is a key that a file leaves out.
    texts = {
        names: re.sub(r"\bNone(: | where)", r"left out\1", text).removesuffix(".") for names, text in texts.items()
    }
    return {name: text for names, text in texts.items() for name in names.split(", ")}


# What is written between the marks of a page; of a page without marks, all of it.
PAGES: dict[Path, Callable[[], str]] = {
    REFERENCE / "commands.md": write_commands,
    REFERENCE / "plan-keys.md": write_plan_keys,
    REFERENCE / "cluster-files.md": write_presets,
}
BEGIN, END = "<!-- generated: python -m tests.docs.generated_pages -->\n", "<!-- end -->"


def update(page: str, text: str) -> str:
    """Return a page with what is generated in it replaced."""
    head, begin, rest = page.partition(BEGIN)
    return head + BEGIN + text + END + rest.partition(END)[2] if begin else BEGIN + text + END + "\n"


if __name__ == "__main__":
    for path, write in PAGES.items():
        path.write_text(update(path.read_text() if path.exists() else "", write()))
