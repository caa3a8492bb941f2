"""The page of the zoo, docs/results/models.md, written from what was measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo.families import FAMILIES
from benchmarks.zoo.prove import EQUAL, FAILED, FUNCTIONS, PLANS, REFUSED, UNEQUAL, WHOLE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "models.md"
MEASURED = Path(__file__).with_name("measured")

# Of a model: its capture, under "capture", and what each plan came to, under the plan.
Found = dict[str, dict[str, Any]]

SIGNS = {EQUAL: "equal", REFUSED: "refused", UNEQUAL: "**NOT equal**", FAILED: "**FAILED**"}

HEAD = """# Models of other packages

Written by `make zoo`: third-party models, unmodified, small, with random weights. Each is trained for two steps by
seven plans and compared by `verify` with one device in float64. *Equal*: every loss, gradient, weight, buffer and
optimizer state agrees within 1e-9. *Refused*: stopped before the first step with the one-line message below. *whole*:
every operator of the model is in the graph; *functions*: as *whole*, with each custom autograd function as one node
with its own backward pass; *leaves*: some modules run as your own Python code; *opaque*: the whole model does, so only
its samples can be split.
"""


def load_measured(folder: Path = MEASURED) -> dict[str, dict[str, Found]]:
    """What was found, by family and model."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


# The part of a file's path that differs between machines: what is before installed packages, the zoo, torch's sources.
_FOLDERS = re.compile(r"/[^\s():]*?/(?=benchmarks/zoo/|aten/src/)|/[^\s():]*/(?:site|dist)-packages/")


# A file that a package generates for a layer, with a random end (torch_geometric's message passing).
_GENERATED = re.compile(r"/[^\s():]*/((?:\w+\.)+\w+)_\w{8}\.py\b")


def name_files_alike(told: str) -> str:
    """Return what was said with its files as they are called on every machine: from their package's name on."""
    return _GENERATED.sub(r"\1.py", _FOLDERS.sub("", told))


def save_found(family: str, name: str, found: Iterable[Mapping[str, Any]], folder: Path = MEASURED) -> None:
    """Keep what was found of a model, beside what is known of it by other plans."""
    path = folder / f"{family}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    of = known.setdefault(name, {})
    for line in found:
        values = {key: value for key, value in line.items() if key not in ("name", "plan")}
        values["told"] = name_files_alike(values["told"])
        of[line.get("plan", "capture")] = values
    ordered = {model: known[model] for model in sorted(known)}
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def render_page(measured: Mapping[str, Mapping[str, Found]]) -> str:
    """The page, of all models that are in the zoo and were measured."""
    parts = [HEAD, _summary(measured)]
    for family in FAMILIES:
        found = {name: measured[family.name][name] for name in family.entries if name in measured.get(family.name, {})}
        if found:
            packages = {name: family.entries[name].package for name in found}
            parts.append(f"## {family.title}\n\n{_table(found, packages)}{_reasons(found)}")
    return "\n".join(parts)


def _summary(measured: Mapping[str, Mapping[str, Found]]) -> str:
    models = [
        found for family in FAMILIES for name, found in measured.get(family.name, {}).items() if name in family.entries
    ]
    verdicts = [found[plan]["verdict"] for found in models for plan in PLANS if plan in found]
    accepted = [verdict for verdict in verdicts if verdict != REFUSED]
    equal = verdicts.count(EQUAL)
    how = [found["capture"]["how"] for found in models if "capture" in found]
    kept = how.count(FUNCTIONS)
    functions = f", and {kept} but for custom autograd functions" if kept else ""
    seconds = sorted(found["capture"]["seconds"] for found in models if "capture" in found)
    if not accepted:
        return "Nothing is measured yet.\n"
    return (
        f"**{len(models)} models, {len(verdicts)} pairs of a model and a plan: {len(accepted)} accepted "
        f"({len(accepted) / len(verdicts):.1%}), {equal} of these equal ({equal / len(accepted):.1%}), "
        f"{len(verdicts) - len(accepted)} refused.** {how.count(WHOLE)} models are captured whole{functions}; "
        f"a capture takes {seconds[len(seconds) // 2]:.1f} s (median), {seconds[-1]:.1f} s at most.\n"
    )


def _table(found: Mapping[str, Found], packages: Mapping[str, str]) -> str:
    heads = ["model", "package", "parameters", "captured", "seconds", *(f"`{plan}`" for plan in PLANS)]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for name, of in found.items():
        capture = of.get("capture", {})
        how = capture.get("how", "–")
        cells = [SIGNS[of[plan]["verdict"]] if plan in of else "–" for plan in PLANS]
        size = f"{capture.get('parameters', 0) / 1e6:.2f} M"
        lines.append(_row([name, packages[name], size, how, f"{capture.get('seconds', 0):.1f}", *cells]))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _reasons(found: Mapping[str, Found]) -> str:
    """The reasons for what is not equal or not whole: a line for each sentence, with its models and plans."""
    who: dict[str, list[str]] = {}
    for name, of in found.items():
        capture = of.get("capture", {})
        if capture.get("told"):
            who.setdefault(f"*{capture['how']}*: {capture['told']}", []).append(name)
        for plan in PLANS:
            if plan in of and of[plan]["verdict"] != EQUAL:
                who.setdefault(f"*{of[plan]['verdict']}*: {of[plan]['told']}", []).append(f"{name} `{plan}`")
    return "".join(f"\n* {', '.join(names)} – {why}" for why, names in who.items()) + ("\n" if who else "")


def write_page() -> None:
    """Write docs/results/models.md."""
    PAGE.write_text(render_page(load_measured()))
