"""polylane --help and --version: quick, and with an example of every command."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

import pytest

import polylane
from polylane.cli import ORDER
from polylane.commands.printing import format_ranges
from polylane.commands.running.option_groups import SavingOptions
from tests.cli.tiny_recipe import call


def test_help_and_lanes_do_not_import_torch() -> None:
    code = """
import sys
import polylane.cli
for line in (["--help"], ["train", "--help"], ["lanes", "1f1b", "--stages", "2", "--microbatches", "2"]):
    try:
        polylane.cli.main(line)
    except SystemExit as leaving:
        assert not leaving.code
assert not {"torch", "numpy", "sklearn"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_many_numbers_are_ranges() -> None:
    assert format_ranges([0, 3, 1]) == "0, 3, 1" and format_ranges([]) == ""
    assert format_ranges(range(12)) == "0-11 (12)"
    assert format_ranges([*range(8), 20, 21, 23]) == "0-7, 20-21, 23 (11)"
    assert format_ranges([n for start in range(0, 4000, 100) for n in range(start, start + 50)]) == (
        "0-49, 100-149, ..., 3900-3949 (2,000)"
    )


def test_help_lists_all_commands_in_their_order_with_whole_sentences() -> None:
    listed = call("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(ORDER)
    assert not [line for line in listed if not line.endswith(".") or line.endswith("...")]


def test_help_has_a_section_for_each_group_of_options() -> None:
    """In its section, behind the options of no group, stands every option of a group, and no other."""
    sections = re.split(r"^(\w.*):\n", call("train", "--help").stdout, flags=re.MULTILINE)[1:]
    texts = zip(sections[::2], sections[1::2], strict=True)
    options = {title: re.findall(r"^  --([\w-]+)", text, re.MULTILINE) for title, text in texts}
    assert options["Logs"] == ["log", "log-every"]
    assert options[SavingOptions.title] == [field.name.replace("_", "-") for field in fields(SavingOptions)]
    assert list(options)[:2] == ["Arguments", "Options"] and "json" in options["Options"]


@pytest.mark.parametrize("command", ["train", "verify", "inspect", "lanes"])
def test_help_of_every_command_has_an_example(command: str) -> None:
    assert f"  {command} " in call("--help").stdout
    assert call("-h").stdout == call("--help").stdout == call().stdout
    told = call(command, "--help")
    assert told.exit_code == 0
    assert f"polylane {command} " in told.stdout
    assert "--json" in told.stdout


def test_version() -> None:
    assert call("--version").stdout == f"{polylane.__version__}\n"
