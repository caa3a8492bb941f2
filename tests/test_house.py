"""Laws of the source tree, read from its syntax: who may import whom, how large things are, and how they are named.

Every law is a plain function from a :class:`SourceTree` to its findings, each "file: what". A law is held on the tree
of the library, and shown to see something in a tiny tree that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = "polylane"
TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / PACKAGE

# Rooms from the ground up: the folders and files at the top of the package. A room imports from lower floors only; the
# rooms of one floor do not import from each other. "__init__" is the package's own file.
FLOORS = (
    ("errors",),
    ("settings", "yaml_file", "output", "parent_death", "faults"),
    ("recipe", "callbacks"),
    ("graph", "cluster", "optim", "efficiency"),
    ("schedule",),
    ("placement",),
    ("observe",),
    ("plan",),
    ("program",),
    ("samples", "diagnosis"),
    ("checkpoint",),
    ("cost",),
    ("profiling",),
    ("sharding",),
    ("planner",),
    ("compile",),
    ("runtime",),
    ("probe",),
    ("inspection",),
    ("verify",),
    ("auto",),
    ("script",),
    ("integrations", "loggers"),
    ("__init__",),
    ("commands",),
    ("cli", "cli_groups", "cli_launching", "cli_options", "cli_planning", "cli_running"),
    ("__main__",),
)
SAME_ROOM = {
    "cli_groups": "cli",
    "cli_launching": "cli",
    "cli_options": "cli",
    "cli_planning": "cli",
    "cli_running": "cli",
}  # files that belong to another one's room

MOST_FILES = 18  # of a folder, its __init__.py not counted
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
FEWEST_WORDS = 4  # of an argument's description
SECTIONS = ("Args:", "Attributes:")

# Module names that tell nothing of what is inside.
EMPTY_NAMES = """
across allowed apart attend base binding call common core cut cuts draft edges empty fair fewest given held helpers
holding keeping lane leaf leaving letters line misc moments move narrow opaque orders own part pieces reduced result
rule scene slow steps strict stuff things together tools totals touches trial turn twins under_way util utils view
walk wholes wide work
"""

# Names of variables that tell nothing of what these hold: a variable is named after its class or its quantity.
VAGUE_NAMES = """
own each found kept held other others here there one every whole both further told said more less wanted given made
how what which where it they them this that some any all these those same alike apart together known seen left rest
most least now before after first last again asked taken done ended begun put place way ways work who whose mine theirs
such ones beside inside outside around
"""

# How many findings a law has when the whole tree keeps it.
ALLOWED = {"hollow argument docs": 6, "variables that are no nouns": 232}
# Laws that the tree does not keep yet, with the findings that are left: these numbers only become smaller.
PENDING = dict[str, int]()


@dataclass(frozen=True)
class Module:
    """One file of a package.

    Attributes:
        path: of the file, inside the package's folder.
        lines: number of lines of the file.
        syntax: what the file parses to.
    """

    path: Path
    lines: int
    syntax: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax: walked once, for all laws."""
        return list(ast.walk(self.syntax))

    @property
    def room(self) -> str:
        """The folder or file at the top of the package that the module belongs to."""
        top = self.path.with_suffix("").parts[0]
        return SAME_ROOM.get(top, top)

    def named(self, what: str, node: ast.stmt | None = None) -> str:
        """One finding: the file, with a line where there is one, and what was found there."""
        return f"{self.path}{f':{node.lineno}' if node else ''}: {what}"


class SourceTree:
    """Every module of a package by its dotted name inside the package; the package itself has the name "".

    Args:
        folder: the package's folder, for example src/polylane.
    """

    def __init__(self, folder: Path) -> None:
        self.modules = dict[str, Module]()
        for file in sorted(folder.rglob("*.py")):
            path, text = file.relative_to(folder), file.read_text()
            parts = [part for part in path.with_suffix("").parts if part != "__init__"]
            self.modules[".".join(parts)] = Module(path, len(text.splitlines()), ast.parse(text))

    def walk(self) -> Iterator[tuple[Module, ast.AST]]:
        """Every node of every module's syntax, with the module it is in."""
        for module in self.modules.values():
            for node in module.nodes:
                yield module, node

    def imports(self) -> Iterator[tuple[str, str, ast.stmt]]:
        """Names of a module and of one that it imports, and the statement; inside functions and for types alike."""
        for name, module in self.modules.items():
            for node in module.nodes:
                if isinstance(node, ast.Import):
                    asked = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    asked = [f"{node.module}.{alias.name}" for alias in node.names]
                else:
                    continue
                for target in asked:
                    if target.split(".")[0] == PACKAGE and (found := self._nearest(target)) != name:
                        yield name, found, node

    def _nearest(self, dotted: str) -> str:
        """The module that an import reads: the longest beginning of the name that is one of the tree's."""
        name = dotted.partition(".")[2]
        while name not in self.modules and name:
            name = name.rpartition(".")[0]
        return name


Law = Callable[[SourceTree], list[str]]


def floor_of(module: Module) -> int | None:
    """The floor of a module's room, counted from the ground; None where the room has none."""
    return next((number for number, rooms in enumerate(FLOORS) if module.room in rooms), None)


def find_rooms_without_floor(tree: SourceTree) -> list[str]:
    """Rooms that FLOORS does not name."""
    missing = dict[str, Module]()
    for module in tree.modules.values():
        if floor_of(module) is None:
            missing.setdefault(module.room, module)
    return [module.named(f"the room {room} has no floor") for room, module in missing.items()]


def find_climbing_imports(tree: SourceTree) -> list[str]:
    """Imports from a higher floor, or from another room of the same floor."""
    found = []
    for name, target, node in tree.imports():
        module, other = tree.modules[name], tree.modules.get(target)
        if other is None or module.room == other.room:
            continue
        here, there = floor_of(module), floor_of(other)
        if here is not None and there is not None and there >= here:
            found.append(module.named(f"{module.room} imports {target or PACKAGE}, which is not below it", node))
    return list(dict.fromkeys(found))  # once for a statement, whatever names it imports


def find_relative_imports(tree: SourceTree) -> list[str]:
    """Imports that begin with a dot: the other laws read absolute ones."""
    nodes = ((module, node) for module, node in tree.walk() if isinstance(node, ast.ImportFrom) and node.level)
    return [module.named("a relative import", node) for module, node in nodes]


def find_circular_imports(tree: SourceTree) -> list[str]:
    """Circles of any length: sets of modules that all import one another in the end (strongly connected components)."""
    graph = nx.DiGraph([(name, target) for name, target, _ in tree.imports()])
    circles = [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    return [tree.modules[circle[0]].named(f"in a circle of imports: {', '.join(circle)}") for circle in sorted(circles)]


def find_mutual_folders(tree: SourceTree) -> list[str]:
    """Folders of a room that import each other: none of the two can be read without the other one.

    A folder is the modules that are in it itself, not those in folders inside of it. Between a folder and one inside of
    it only the graph's room is held: elsewhere the files of a room use its drawers, which use what these files share.
    """

    def folder_of(name: str) -> str:
        return str(tree.modules[name].path.parent)

    def is_held(a: str, b: str, room: str) -> bool:
        return a < b and (room == "graph" or not b.startswith(f"{a}/"))

    pairs = [(a, b, tree.modules[a].room) for a, b, _ in tree.imports() if tree.modules[a].room == tree.modules[b].room]
    edges = {(folder_of(a), folder_of(b), room) for a, b, room in pairs}
    return [
        f"{a} and {b} import each other"
        for a, b, room in sorted(edges)
        if (b, a, room) in edges and is_held(a, b, room)
    ]


def find_crowded_folders(tree: SourceTree) -> list[str]:
    """Folders of more than MOST_FILES files."""
    paths = [module.path for module in tree.modules.values()]
    counts = Counter(path.parent for path in paths if path.name != "__init__.py")
    return [f"{folder}: {count} files" for folder, count in sorted(counts.items()) if count > MOST_FILES]


def find_repeated_classes(tree: SourceTree) -> list[str]:
    """Public classes of one name in several modules."""
    homes = defaultdict[str, list[Module]](list)
    for module in tree.modules.values():
        for node in module.syntax.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    repeated = {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}
    return [
        modules[0].named(f"class {name} is also in {', '.join(str(other.path) for other in modules[1:])}")
        for name, modules in repeated.items()
    ]


def find_long_files(tree: SourceTree) -> list[str]:
    """Files of more than MOST_LINES_OF_A_FILE lines."""
    long = (module for module in tree.modules.values() if module.lines > MOST_LINES_OF_A_FILE)
    return [module.named(f"{module.lines} lines") for module in long]


def find_long_functions(tree: SourceTree) -> list[str]:
    """Functions of more than MOST_LINES_OF_A_FUNCTION lines: their docstring counted, but for the examples at its end,
    and their decorators not."""
    found = []
    for module, node in tree.walk():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            examples = (ast.get_docstring(node) or "").partition("Examples:\n")[1:]
            lines = node.end_lineno - node.lineno + 1 - len("".join(examples).splitlines())
            if lines > MOST_LINES_OF_A_FUNCTION:
                found.append(module.named(f"{node.name} has {lines} lines", node))
    return found


def read_argument_docs(doc: str) -> dict[str, str]:
    """Descriptions by name ("a, b" where one line is for several) of a docstring's sections Args and Attributes."""
    found, inside, name = dict[str, str](), False, ""
    for line in doc.splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if indent == 0:
            inside = text in SECTIONS
        elif inside and indent == 4 and (entry := re.match(r"([\w*, ]+): (.*)", text)):
            name = entry.group(1)
            found[name] = entry.group(2)
        elif inside and indent > 4 and name:
            found[name] += f" {text}"
    return found


def find_hollow_argument_docs(tree: SourceTree) -> list[str]:
    """Arguments and attributes that are described in fewer than FEWEST_WORDS words."""
    found = []
    for module, node in tree.walk():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name, text in read_argument_docs(ast.get_docstring(node) or "").items():
                if len(text.split()) < FEWEST_WORDS:
                    found.append(module.named(f"{node.name}: {name}: {text}", node))
    return found


def find_empty_names(tree: SourceTree) -> list[str]:
    """Modules and folders with a name that tells nothing."""
    parts = {part for module in tree.modules.values() for part in (module.path, *module.path.parents)}
    return [f"{path}: an empty name" for path in sorted(parts) if path.stem in EMPTY_NAMES.split()]


def find_vague_variables(tree: SourceTree) -> list[str]:
    """Variables and parameters whose name is no noun; "left" stands beside "right"."""
    vague = {*VAGUE_NAMES.split()}
    findings = []
    for module, node in tree.walk():
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        is_bound = isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        if is_bound and name.strip("_") in vague:
            findings.append(module.named(f"{name} is no noun", node))
    return findings


LAWS: dict[str, Law] = {
    "rooms without a floor": find_rooms_without_floor,
    "climbing imports": find_climbing_imports,
    "relative imports": find_relative_imports,
    "circular imports": find_circular_imports,
    "folders that import each other": find_mutual_folders,
    "crowded folders": find_crowded_folders,
    "repeated class names": find_repeated_classes,
    "long files": find_long_files,
    "long functions": find_long_functions,
    "hollow argument docs": find_hollow_argument_docs,
    "empty module names": find_empty_names,
    "variables that are no nouns": find_vague_variables,
}


@cache
def read_library() -> SourceTree:
    """The library's tree, read once for all tests of a process."""
    return SourceTree(SOURCE)


@pytest.fixture
def library() -> SourceTree:
    return read_library()


@pytest.mark.parametrize("law", LAWS)
def test_the_library_keeps_the_law(law: str, library: SourceTree) -> None:
    found, most = LAWS[law](library), PENDING.get(law, ALLOWED.get(law, 0))
    assert len(found) <= most, f"{len(found)} {law}, at most {most}:\n" + "\n".join(found)


def test_the_architecture_names_every_folder() -> None:
    page = (SOURCE.parents[1] / "docs" / "development" / "architecture.md").read_text()
    folders = [folder.parent.relative_to(SOURCE) for folder in sorted(SOURCE.rglob("*/__init__.py"))]
    assert [str(folder) for folder in folders if f"`{folder}/`" not in page] == []


def test_every_folder_has_tests() -> None:
    """In a folder of the same name, or in those that its header names ("Its tests are in ``tests/...``")."""
    for header in sorted(SOURCE.rglob("*/__init__.py")):
        folder = header.parent.relative_to(SOURCE)
        names = re.findall(r"``(tests/[\w/]+)``", header.read_text()) or [f"tests/{folder}"]
        assert all(any((TESTS.parent / name).rglob("test_*.py")) for name in names), f"{folder} has no tests: {names}"


def test_what_tests_share_is_in_a_folder() -> None:
    """Beside the tests of a room, or in ``tests/support``, whose folders are held to laws of the library's."""
    loose = {file.name for file in TESTS.glob("*.py") if not file.name.startswith("test_")}
    assert loose == {"__init__.py", "conftest.py"}
    support = SourceTree(TESTS / "support")
    assert [rule for rule in ("crowded folders", "long functions", "empty module names") if LAWS[rule](support)] == []


def test_benchmarks_keep_the_laws_of_folders_files_and_functions() -> None:
    """``benchmarks`` has a folder for each subject, and beside them only what they share."""
    tree = SourceTree(TESTS.parent / "benchmarks")
    laws = ("crowded folders", "long files", "long functions", "empty module names")
    assert {law: found for law in laws if (found := LAWS[law](tree))} == {}


def test_what_is_pending_is_a_law() -> None:
    assert set(PENDING) | set(ALLOWED) <= set(LAWS)


def test_every_room_of_the_library_is_read(library: SourceTree) -> None:
    assert len(library.modules) > 200 and {"", "errors", "runtime.job", "placement.rules"} <= set(library.modules)


# What each law finds in a tree that breaks it, with what it must leave alone in the same tree.
LONG_FUNCTION = "def long():\n" + "    pass\n" * MOST_LINES_OF_A_FUNCTION
SHORT_FUNCTIONS = "def short():\n" + "    pass\n" * (MOST_LINES_OF_A_FUNCTION - 1)
SHORT_FUNCTIONS += SHORT_FUNCTIONS.replace("pass", '"""Examples:\n        >>> 1\n        1\n    """', 1)
DOCS = '''
class Thing:
    """A thing.

    Attributes:
        size, width: of it.
        height: in metres, of the thing
            as it stands.
    """

def make(where, how):
    """Make a thing.

    Args:
        where: whose that is.
        how: the way in which it is made.

    Raises:
        ValueError: never.
    """
'''
PLANTED: Mapping[str, tuple[Mapping[str, str], Sequence[str]]] = {
    "rooms without a floor": (
        {"attic/chest.py": "", "attic/trunk.py": "", "cost/price.py": ""},
        ["attic/chest.py: the room attic has no floor"],
    ),
    "climbing imports": (
        {
            "cost/price.py": "import polylane.errors\nfrom polylane.runtime.job import Job, Other\n",
            "graph/graph.py": "def f():\n    from polylane.cluster import link\n",
            "runtime/job.py": "import torch\nfrom polylane.cost.price import x\nfrom polylane.runtime import data\n",
            "runtime/data/loader.py": "",
            "cluster/link.py": "",
            "errors.py": "",
        },
        [
            "cost/price.py:2: cost imports runtime.job, which is not below it",
            "graph/graph.py:2: graph imports cluster.link, which is not below it",
        ],
    ),
    "relative imports": (
        {"cost/price.py": "from . import table\nfrom polylane.errors import x\n"},
        ["cost/price.py:1: a relative import"],
    ),
    "circular imports": (
        {
            "cost/a.py": "from polylane.cost.b import x\n",
            "cost/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from polylane.cost import c\n",
            "cost/c.py": "def f():\n    from polylane.cost.a import y\n",
            "cost/d.py": "from polylane.cost.a import x\n",
        },
        ["cost/a.py: in a circle of imports: cost.a, cost.b, cost.c"],
    ),
    "folders that import each other": (
        {
            "graph/graph.py": "from polylane.graph.capture.python import values\n",
            "graph/capture/capture.py": "from polylane.graph.capture.python.values import x\n",
            "graph/capture/run.py": "from polylane.graph.graph import y\n",
            "graph/capture/python/values.py": "def f():\n    from polylane.graph.capture import run\n",
            "cost/memory/peak.py": "from polylane.cost.price import x\n",
            "cost/price.py": "from polylane.cost.memory.ranges import y\n",
            "cost/memory/ranges.py": "",
            "runtime/sync/mean.py": "from polylane.runtime.state.held import x\n",
            "runtime/state/held.py": "",
            "runtime/state/saved.py": "from polylane.runtime.sync import mean\n",
        },
        [
            "graph/capture and graph/capture/python import each other",
            "runtime/state and runtime/sync import each other",
        ],
    ),
    "crowded folders": (
        {f"{folder}/file{number}.py": "" for folder, count in (("cost", 19), ("plan", 18)) for number in range(count)}
        | {"plan/__init__.py": ""},
        ["cost: 19 files"],
    ),
    "repeated class names": (
        {
            "cost/a.py": "class Held: ...\nclass _Own: ...\nclass One:\n    class Held: ...\n",
            "plan/b.py": "class Held: ...\nclass _Own: ...\n",
        },
        ["cost/a.py: class Held is also in plan/b.py"],
    ),
    "long files": (
        {"cost/a.py": "#\n" * 401, "cost/b.py": "#\n" * 400},
        ["cost/a.py: 401 lines"],
    ),
    "long functions": (
        {"cost/a.py": f"{LONG_FUNCTION}\nasync {LONG_FUNCTION}", "cost/b.py": SHORT_FUNCTIONS},
        ["cost/a.py:1: long has 61 lines", "cost/a.py:63: long has 61 lines"],
    ),
    "hollow argument docs": (
        {"cost/a.py": DOCS},
        ["cost/a.py:2: Thing: size, width: of it.", "cost/a.py:11: make: where: whose that is."],
    ),
    "empty module names": (
        {"cost/result.py": "", "cost/utils/price.py": "", "cost/step_result.py": ""},
        ["cost/result.py: an empty name", "cost/utils: an empty name"],
    ),
    "variables that are no nouns": (
        {"cost/a.py": "def f(how, price):\n    _own = [each.whole for each in price]\n    return _own, whole\n"},
        ["cost/a.py:1: how is no noun", "cost/a.py:2: _own is no noun", "cost/a.py:2: each is no noun"],
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_the_law_sees_what_breaks_it(law: str, tmp_path: Path) -> None:
    files, expected = PLANTED[law]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert LAWS[law](SourceTree(tmp_path)) == expected
