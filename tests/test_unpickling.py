"""Nothing is unpickled that came over a socket or from a file, and no text that was read is run as code.

Every place of the library that could do so is found from its syntax; each that stays is named here, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "polylane"

# Modules whose every reading function runs what it reads, or may; their names may not be brought in one by one either.
RUNNING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
WRITING = {"dump", "dumps", "PicklingError", "PickleError"}  # of these modules: they read nothing
# Functions by the end of their dotted name.
RUNNING = {
    "torch.load": "unpickles",
    "serialization.load": "unpickles",
    "checkpoint.load": "unpickles the metadata",
    "pandas.read_pickle": "unpickles",
    "pd.read_pickle": "unpickles",
    "torch.jit.load": "runs a program",
    "torch.package.PackageImporter": "runs a program",
    "torch.hub.load": "runs a program",
    "torch.export.load": "unpickles",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
    "yaml.unsafe_load": "runs tags",
    "yaml.full_load": "runs tags",
    "yaml.load": "may run tags",
    "yaml.load_all": "may run tags",
    "multiprocessing.SimpleQueue": "unpickles",
}
LAST = {name.rpartition(".")[2] for name in RUNNING}
# Collectives of torch.distributed that unpickle; polylane's own of the same names are in transport/plain_objects.py.
OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"} | {
    "send_object_list",
    "recv_object_list",
}
DISTRIBUTED = ("dist", "distributed", "c10d", "distributed_c10d")
# Modules whose every message is a pickle.
MESSAGING = ("distributed.rpc",)
BUILT_IN = {"eval", "exec", "compile", "__import__"}
# Methods of any object: multiprocessing's connections and queues unpickle, those of sockets do not take to being told
# apart here, so that each use is looked at.
METHODS = {
    "recv": "may be a multiprocessing connection's, which unpickles",
    "get_nowait": "may be a queue's",
}
# What makes queues, managers and shared dicts, which pickle.
QUEUES = {"Queue", "JoinableQueue", "Manager", "BaseManager", "Pool", "ProcessPoolExecutor"}

_WORTH_PARSING = re.compile(
    "|".join(rf"\b{word}\b" for word in RUNNING_MODULES | LAST | OBJECTS | BUILT_IN | set(METHODS) | QUEUES | {"rpc"})
)

# Places that stay: file and function, what is called there, and why that is right.
ALLOWED = {
    # The value of a function that a forked worker has run: it came through the pipe below, as bytes.
    ("script/launch.py", "launch", "torch.load"),
    # The user's own script is compiled, to tell a syntax error before any worker starts, and not run there.
    ("commands/run.py", "check_script", "compile"),
    # A result is any value of the worker's function, and comes through the pipe that the parent made before it forked,
    # or through spawn.py's socket in a folder of mode 0700, after the job's secret: both ends are this job's.
    ("runtime/workers/worker_pipe.py", "WorkerPipe._take", "torch.load"),
    # A failure, through the same pipe: it may carry a user's own exception.
    ("runtime/workers/worker_pipe.py", "WorkerPipe._take", "pickle.loads"),
    # The exception inside of such a failure.
    ("runtime/workers/failure.py", "Failure.to_exception", "pickle.loads"),
    # The worker's own exception, pickled by the line before, to see whether it survives.
    ("runtime/workers/failure.py", "_pickle_error", "pickle.loads"),
    # What builds a training for an auditor, through the pipe that rank 0 made for the process that it started.
    ("verify/audit/auditor_process.py", "run_new_process", "pickle.loads"),
    # Code that torch.fx generated in this process from a captured graph.
    ("runtime/pipeline/generated_code.py", "generate_code", "exec"),
    ("runtime/pipeline/generated_code.py", "generate_code", "compile"),
    # Formulas of sizes, written here from traced numbers of known operators; no text of a file is in them.
    ("graph/traced_sizes.py", "_compile", "exec"),
    # The user's own loss, without some of its lines, compiled from the source that it was compiled from.
    ("graph/capture/python/function_source.py", "build_function", "compile"),
    # A SEQPACKET socket's and a process group's: they return bytes and fill tensors.
    ("runtime/transport/shared_memory/rendezvous.py", "_read_introduction", ".recv"),
    ("runtime/transport/c10d.py", "", ".recv"),
    # TCP sockets': bytes of a fixed number, or none that are kept.
    ("probe/health/meeting.py", "_answer", ".recv"),
    ("probe/health/meeting.py", "_receive", ".recv"),
}


def find_places(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, function and name of every use of what runs or unpickles what it reads."""
    if not _WORTH_PARSING.search(text):  # parsing the whole library takes seconds
        return
    for function, node in _with_functions(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, function, name) for name in _judge_imports(node))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in RUNNING_MODULES and alias.asname:
                    yield node.lineno, function, f"import {alias.name} as"
        elif isinstance(node, ast.Attribute | ast.Name):
            yield from ((node.lineno, function, name) for name in _judge(node))


def _judge(node: ast.Attribute | ast.Name) -> Iterator[str]:
    if isinstance(node, ast.Name):
        if node.id in BUILT_IN | QUEUES and isinstance(node.ctx, ast.Load):
            yield node.id
        return
    name, last = _dotted(node), node.attr
    owner = name.split(".")[-2]
    if name.partition(".")[0] in RUNNING_MODULES:
        if last not in WRITING:
            yield name
    elif (
        (last in LAST and any(f".{name}".endswith(f".{each}") for each in RUNNING))
        or (last in OBJECTS and owner in DISTRIBUTED)
        or any(name.endswith(each) for each in MESSAGING)
    ):
        yield name
    elif last in METHODS or last in QUEUES:
        yield f".{last}"


def _judge_imports(node: ast.ImportFrom) -> Iterator[str]:
    """Yield what is brought in one by one, under whatever name, and so is not seen where it is called."""
    module = node.module or ""
    if module.split(".")[0] in RUNNING_MODULES:
        yield f"from {module} import"
    for name in (alias.name for alias in node.names):
        whole = f"{module}.{name}"
        is_running = any(f".{whole}".endswith(f".{each}") for each in RUNNING)
        is_distributed = name in OBJECTS and module.split(".")[-1] in DISTRIBUTED
        if is_running or is_distributed or any(each in whole for each in MESSAGING):
            yield f"from {module} import {name}"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _with_functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node, with the dotted name of the class and function that it is in."""
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        function, node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        yield function, node
        todo += [(function, inner) for inner in ast.iter_child_nodes(node)]


def is_allowed(file: str, function: str, name: str) -> bool:
    return any(file == each and name == what and function.endswith(where) for each, where, what in ALLOWED)


def test_nothing_else_unpickles_or_runs_what_it_reads() -> None:
    found = [
        f"{file.relative_to(SOURCE)}:{line}: {name} in {function or 'the module'}"
        for file in sorted(SOURCE.rglob("*.py"))
        for line, function, name in find_places(file.read_text())
        if not is_allowed(str(file.relative_to(SOURCE)), function, name)
    ]
    assert found == [], "send plain values (runtime/plain_data/serialization.py), or name the place and why it is right"


def test_every_allowed_place_is_there() -> None:
    for file, where, what in ALLOWED:
        places = find_places((SOURCE / file).read_text())
        assert any(name == what and function.endswith(where) for _, function, name in places), (file, where, what)


PLANTED = {
    "import pickle\npickle.loads(x)": ["pickle.loads"],
    "import pickle\nread = pickle.load": ["pickle.load"],
    "import pickle\npickle.Unpickler(f).load()": ["pickle.Unpickler"],
    "import pickle\npickle.dumps(x)": [],
    "from pickle import loads": ["from pickle import"],
    "import pickle as p": ["import pickle as"],
    "import marshal\nmarshal.loads(x)": ["marshal.loads"],
    "import shelve\nshelve.open(x)": ["shelve.open"],
    "torch.load(x, weights_only=True)": ["torch.load"],
    "torch.distributed.all_gather_object(a, b)": ["torch.distributed.all_gather_object"],
    "world.all_gather_object(a)": [],
    "from torch.distributed import all_gather_object as gather": ["from torch.distributed import all_gather_object"],
    "from polylane.runtime.plain_data.plain_objects import all_gather": [],
    "from torch import load": ["from torch import load"],
    "from torch.serialization import load": ["from torch.serialization import load"],
    "import torch.distributed.checkpoint as dcp\ntorch.distributed.checkpoint.load(x)": [
        "torch.distributed.checkpoint.load"
    ],
    "from torch.distributed.checkpoint import load": ["from torch.distributed.checkpoint import load"],
    "from torch.distributed.rpc import rpc_sync": ["from torch.distributed.rpc import rpc_sync"],
    "torch.distributed.rpc.rpc_sync(a)": ["torch.distributed.rpc"],
    "from yaml import safe_load": [],
    "import pandas as pd\npd.read_pickle(x)": ["pd.read_pickle"],
    "import torch.distributed as dist\ndist.all_gather_object(a, b)": ["dist.all_gather_object"],
    "yaml.load(x, Loader)": ["yaml.load"],
    "eval(x)": ["eval"],
    "f = exec": ["exec"],
    "re.compile(x)": [],
    "pipe.recv()": [".recv"],
    "pipe.recv_bytes()": [],
    "multiprocessing.Queue()": [".Queue"],
    "queue.get_nowait()": [".get_nowait"],
}


@pytest.mark.parametrize("text", PLANTED)
def test_what_is_found(text: str) -> None:
    assert [name for _, _, name in find_places(text)] == PLANTED[text]
