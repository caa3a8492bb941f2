"""A mutant of the package: one expression of one function replaced, in a copy that stands first on the import path.

What is replaced is named by its function and by its own source text, read as syntax: neither lines nor layout matter.
Where the text is not found exactly as often as stated, the mutant is refused: a table that no longer fits the code
fails instead of testing nothing.
"""

from __future__ import annotations

import ast
import builtins
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "polylane"


class Misfit(Exception):
    """A mutant does not fit the code as it is."""


@dataclass(frozen=True)
class Mutant:
    """One deliberate bug, and who must notice it.

    Attributes:
        id: its name.
        wrong: what is wrong, in one sentence.
        where: the function that is changed, as ``module:qualname`` below polylane; without a qualname the whole module.
        find: the expression or the statements that are replaced.
        put: what stands there instead.
        tests: arguments of pytest: those of the tests that guard the function, of which one must fail.
        gpt, network: what `verify` is asked on either model (see `proofs.Proof.parse`), and must refuse; "" for a bug
            that cannot show there.
        times: how often ``find`` is there; all of them are replaced.
        error: part of the message with which `verify` refuses to run; without it a refusal counts as no answer.
        unseen: why no proof can see it, so that it is for the tests alone.
    """

    id: str
    wrong: str
    where: str
    find: str
    put: str
    tests: str
    gpt: str = ""
    network: str = ""
    times: int = 1
    error: str = ""
    unseen: str = ""


def plant(mutant: Mutant, folder: Path) -> None:
    """Write a copy of the package with this bug into a folder.

    Raises:
        Misfit: the function is not there, or what is to be replaced is not in it as often as stated.
    """
    copied = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copied)  # with its compiled files, which are as old as the sources
    module = mutant.where.partition(":")[0].replace(".", "/") + ".py"
    path = copied / module
    if not path.is_file():
        raise Misfit(f"{mutant.id}: there is no module polylane/{module}")
    changed = mutated(mutant, path.read_text())
    path.unlink()
    path.write_text(changed)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def mutated(mutant: Mutant, source: str) -> str:
    """The source of a module with a mutant's bug in it; all other lines stay where they are.

    Raises:
        Misfit: see :func:`plant`.
    """
    scope = _scope(mutant, ast.parse(source))
    found = list(_matches(scope, mutant.find))
    if len(found) != mutant.times:
        raise Misfit(
            f"{mutant.id}: {mutant.where} has {len(found)} times, not {mutant.times} times, the fragment {mutant.find}"
        )
    lines = source.encode().split(b"\n")
    for first, last in reversed(found):
        _replace(lines, first, last, mutant.put)
    changed = b"\n".join(lines).decode()
    try:
        tree = ast.parse(changed)
    except SyntaxError as error:
        raise Misfit(f"{mutant.id}: what it puts is no Python: {error}") from error
    if unknown := sorted(_read_names(ast.parse(mutant.put)) - _known_names(mutant, tree)):
        raise Misfit(f"{mutant.id}: what it puts reads {', '.join(unknown)}, which {mutant.where} does not have")
    return changed


def _read_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _known_names(mutant: Mutant, tree: ast.Module) -> set[str]:
    """Names that a function may read: those bound in it, in what encloses it, in its module, and Python's own."""
    outermost = mutant.where.partition(":")[2].partition(".")[0]
    known = set(dir(builtins))
    for statement in tree.body:
        is_around = getattr(statement, "name", None) == outermost
        known |= _bound_names(statement, within=is_around or not isinstance(statement, ast.FunctionDef | ast.ClassDef))
    return known


def _bound_names(statement: ast.stmt, within: bool) -> set[str]:
    """Names that a statement binds: a definition its own, and ``within`` it those of everything inside."""
    bound = {statement.name} if isinstance(statement, ast.FunctionDef | ast.ClassDef) else set[str]()
    for node in ast.walk(statement) if within else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return bound


def _scope(mutant: Mutant, tree: ast.Module) -> ast.AST:
    scope: ast.AST = tree
    for name in filter(None, mutant.where.partition(":")[2].split(".")):
        inner = [definition for definition in _defined(scope) if definition.name == name]
        if len(inner) != 1:
            raise Misfit(f"{mutant.id}: {mutant.where} is there {len(inner)} times: no single {name}")
        scope = inner[0]
    return scope


def _defined(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Functions and classes of a scope itself, not those inside of them."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node
        else:
            yield from _defined(node)


_Span = tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]


def _matches(scope: ast.AST, fragment: str) -> Iterator[_Span]:
    """First and last node of every place where a fragment stands, in the order of the source."""
    wanted = ast.parse(fragment).body
    if len(wanted) == 1 and isinstance(wanted[0], ast.Expr):
        form = ast.dump(wanted[0].value)
        found = [(n, n) for n in ast.walk(scope) if isinstance(n, ast.expr) and ast.dump(n) == form]
    else:
        found = list(_statements(scope, [ast.dump(statement) for statement in wanted]))
    yield from sorted(found, key=lambda span: (span[0].lineno, span[0].col_offset))


def _statements(scope: ast.AST, forms: Sequence[str]) -> Iterator[_Span]:
    for node in ast.walk(scope):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            for i in range(len(block) - len(forms) + 1) if isinstance(block, list) else ():
                if [ast.dump(statement) for statement in block[i : i + len(forms)]] == forms:
                    yield block[i], block[i + len(forms) - 1]


def _replace(lines: list[bytes], first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, put: str) -> None:
    """Put other source in a place, which goes over as many lines as before."""
    assert last.end_lineno is not None and last.end_col_offset is not None
    top, bottom = first.lineno - 1, last.end_lineno - 1
    before, after = lines[top][: first.col_offset], lines[bottom][last.end_col_offset :]
    new = put.strip().split("\n")
    if isinstance(first, ast.expr):
        new = ["(" + new[0], *new[1:]]
        new[-1] += "\n" * (bottom - top + 1 - len(new)) + ")"
    else:
        new = [new[0], *(" " * first.col_offset + line for line in new[1:])]
        new += [""] * (bottom - top + 1 - len(new))
    lines[top : bottom + 1] = (before + "\n".join(new).encode() + after).split(b"\n")
