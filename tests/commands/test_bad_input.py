"""Input of commands that once ended in a traceback, in pages of text, or not at all: each is one sentence now."""

from __future__ import annotations

import pytest

from tests.fuzzing.inputs import TINY
from tests.fuzzing.isolation import FuzzInput, run_here
from tests.fuzzing.recipes import WHOLE
from tests.fuzzing.warm_start import warm_up

LONG, DIGITS = "n" * 300, "9" * 5000
LANES = ("lanes", "1f1b", "--microbatches", "2")
SIMULATE = ("simulate", "tiny.py", "--plan", "data=1", "--batch", "12")

SENTENCES = {
    ("train", "tiny.py", "--plan", f"every={DIGITS}"): "has 5,000 digits, and 40 are the most",
    ("train", "tiny.py", "--plan", f"{LONG}.yaml"): "File name too long",
    ("train", "tiny.py", "--plan", "data=2,slow=1:3"): "unknown key 'slow', known are data, pipeline, sequence, tensor",
    ("train", "tiny.py", "--plan", "n" * 5000): "is not of the form key=value",
    ("train", f"{LONG}.py"): "There is no recipe at nnn",
    ("train", "tiny.py", "--steps", "1", "--run", LONG): "cannot be written: File name too long",
    ("inspect", "tiny.py", "--set", f"width={DIGITS}"): "takes a whole number, and '999",
    ("inspect", "tiny.py", "--set", f"{'n' * 5000}=3"): "(5,003 characters)",
    (*LANES, "--stages", LONG): "File name too long",
    (*LANES, "--stages", "\x1b[31mx"): r"stages \x1b[31mx: No such file",
    (*LANES, "--stages", "2", "--svg", LONG): "cannot be written: File name too long",
    (*LANES, "--stages", "2", "--forward", "n" * 5000): "(5,002 characters)",
    ("lanes", "n" * 5000, "--stages", "2", "--microbatches", "2"): "is not one of",
    (*SIMULATE, "--cluster", f"{LONG}.yaml"): "File name too long",
    (*SIMULATE, "--cluster", "n" * 5000): "is not of the form [SITESx]HOSTSxDEVICES:DEVICE",
    (*SIMULATE, "--cluster", "1:v100", "--slow", f"{DIGITS}=1"): "has 5,000 digits, and 40 are the most",
    ("plan", "tiny.py", "--cluster", "1:v100", "--memory", "1e999"): "--memory takes a size",
    ("plan", "tiny.py", "--cluster", "1:v100", "--batch", str(2**63)): "must be at most",
}


@pytest.mark.parametrize("arguments", SENTENCES, ids=[" ".join(words)[:40] for words in SENTENCES])
def test_one_sentence(arguments: tuple[str, ...]) -> None:
    outcome = run_here(FuzzInput("", arguments, {"tiny.py": TINY.encode()}), warm_up())
    assert (outcome.code, outcome.wrong) == (2, ""), outcome
    assert SENTENCES[arguments] in outcome.text
    assert len(outcome.text) < 1000


def test_a_folder_whose_name_turns_the_line_around() -> None:
    words = ("train", "tiny.py", "--steps", "1", "--plan", "data=1", "--run", "\u202egnp")
    given = FuzzInput("", words, {"tiny.py": TINY.encode()})
    outcome = run_here(given, warm_up())
    assert (outcome.code, outcome.wrong) == (0, ""), outcome
    assert r"see \u202egnp/report.html" in outcome.text


NAMED = """
def model():
    made = nn.Sequential()
    for name in ("[/b]", ":smile:", "a\\x1b[31mb", "x" * 40):
        made.add_module(name, nn.Linear(4, 4))
    return made
"""


def test_names_that_read_like_markup_or_commands() -> None:
    recipe = "".join({**WHOLE, "model": NAMED}.values())
    outcome = run_here(FuzzInput("", ("inspect", "odd.py", "--plan", "data=1"), {"odd.py": recipe.encode()}), warm_up())
    assert (outcome.code, outcome.wrong) == (0, ""), outcome
    assert "[/b]" in outcome.text and ":smile:" in outcome.text and r"a\x1b[31mb" in outcome.text


FAILING = {
    "model": "def model():\n    return type('Net', (nn.Module,), {'__init__': lambda self: None})()\n",
    "loss": "def loss(model, batch):\n    raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()\n",
    "collate": "def collate(samples):\n    return torch.ones(0, 4), torch.ones(0)\n",
}
SAID = {
    "model": "an __init__ must call super().__init__() before all else",
    "loss": "its text cannot be told, for its __str__ raises ZeroDivisionError",
    "collate": "the batch has no samples: its first tensor has the shape [0, 4]",
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("command", [("inspect",), ("simulate", "--cluster", "1:v100", "--plan", "data=1")])
def test_a_recipe_that_fails_oddly(name: str, command: tuple[str, ...]) -> None:
    recipe = "".join({**WHOLE, name: FAILING[name]}.values())
    given = FuzzInput("", (command[0], "odd.py", *command[1:]), {"odd.py": recipe.encode()})
    outcome = run_here(given, warm_up())
    assert (outcome.code, outcome.wrong) == (2, ""), outcome
    assert SAID[name] in outcome.text
