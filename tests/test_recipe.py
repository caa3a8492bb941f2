"""Recipes: loading, settings, and the one sentence for everything that can be wrong with them."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.errors import PolylaneError
from polylane.recipe import Mean, RecipeError, load, parse_assignments

GOOD = """
from dataclasses import dataclass

@dataclass
class Net:
    width: int

def model(width=16, shape=(2, 3), names=("a",), dropout=None, bias=True, activation="relu", seq_len=8):
    return Net(width)

def loss(model, batch, smoothing=0.0):
    return smoothing

def optimizer(parameters, lr=0.1, betas=(0.9, 0.99)):
    return lr, betas

def data(split, *, seq_len=8, options={}):
    return [split, seq_len, options]
"""


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Recipes of equal names in different folders: what a test imports goes when it ends."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, text: str = GOOD, name: str = "my_recipe.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def failure(path: Path | str, **settings: str) -> str:
    """The sentence that loading it raises."""
    with pytest.raises(RecipeError) as caught:
        load(path, settings)
    message = str(caught.value)
    assert isinstance(caught.value, PolylaneError)
    assert "\n" not in message
    assert message.endswith(".")
    return message


# Loading


def test_loads_a_file(tmp_path: Path) -> None:
    recipe = load(write(tmp_path))
    assert (recipe.name, recipe.path) == ("my_recipe", tmp_path / "my_recipe.py")
    assert recipe.model().width == 16  # type: ignore[attr-defined]
    assert recipe.data("test") == ["test", 8, {}]
    assert recipe.scheduler is None
    assert recipe.collate is None


def test_loads_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe_package").mkdir()
    write(tmp_path / "recipe_package", "", "__init__.py")
    write(tmp_path / "recipe_package", name="inner.py")
    monkeypatch.chdir(tmp_path)  # importable from the folder one stands in, as with `python -m`
    recipe = load("recipe_package.inner", {"width": "3"})
    assert recipe.model().width == 3  # type: ignore[attr-defined]
    assert recipe.name == "inner"


def test_optional_functions(tmp_path: Path) -> None:
    text = GOOD + "\ndef scheduler(optimizer, warmup=2): return warmup\ndef collate(samples): return len(samples)\n"
    recipe = load(write(tmp_path, text), {"warmup": "5"})
    assert recipe.scheduler is not None
    assert recipe.collate is not None
    assert recipe.scheduler(None) == 5  # type: ignore[arg-type, comparison-overlap]
    assert recipe.collate([1, 2]) == 2


def test_what_a_recipe_defines_can_be_pickled(tmp_path: Path) -> None:
    recipe = load(write(tmp_path), {"width": "4"})
    assert pickle.loads(pickle.dumps(recipe.model())) == recipe.model()
    assert pickle.loads(pickle.dumps(recipe.model))().width == 4
    assert load(tmp_path / "my_recipe.py").model() == load(tmp_path / "my_recipe.py").model()


def test_siblings_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "sibling_recipe.py")
    path = write(tmp_path, "from sibling_recipe import data, loss, model, optimizer\n")
    assert load(path, {"seq_len": "3"}).data("train") == ["train", 3, {}]


@pytest.mark.parametrize("name", ["json.py", "torch.py", "with-dash.py", "models.py"])
def test_a_file_named_like_another_module_replaces_nothing(tmp_path: Path, name: str) -> None:
    stem = name.removesuffix(".py")
    before = sys.modules.get(stem)
    recipe = load(write(tmp_path, GOOD, name))
    assert pickle.loads(pickle.dumps(recipe.model())).width == 16
    if before is not None:
        assert sys.modules[stem] is before


def test_two_recipes_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = load(write(tmp_path / "a"))
    second = load(write(tmp_path / "b", GOOD.replace("width=16", "width=17")))
    assert first.model().width == 16  # type: ignore[attr-defined]
    assert second.model().width == 17  # type: ignore[attr-defined]


def test_reading_recipes_does_not_import_torch() -> None:
    code = "import sys, polylane.recipe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Settings


def test_settings_are_read_as_their_defaults_type(tmp_path: Path) -> None:
    text = GOOD.replace("return Net(width)", "return dict(locals())")
    chosen = {
        "width": "32",
        "shape": "4,5,6",
        "names": "('x', 'y')",
        "dropout": "0.1",
        "bias": "no",
        "activation": "gelu",
        "seq_len": "64",
        "lr": "1e-3",
        "betas": "0.8, 1",
        "options": "{'a': 1}",
    }
    recipe = load(write(tmp_path, text), chosen)
    values: dict[str, Any] = recipe.model()  # type: ignore[assignment]
    assert values == {
        "width": 32,
        "shape": (4, 5, 6),
        "names": ("x", "y"),
        "dropout": 0.1,
        "bias": False,
        "activation": "gelu",
        "seq_len": 64,
    }
    assert recipe.optimizer([]) == (1e-3, (0.8, 1.0))  # type: ignore[comparison-overlap]
    assert recipe.data("train") == ["train", 64, {"a": 1}]  # seq_len is set in both functions that have it
    assert recipe.settings == chosen


def test_a_setting_of_one_function(tmp_path: Path) -> None:
    recipe = load(write(tmp_path), {"data.seq_len": "3", "seq_len": "5"})
    assert recipe.data("train")[1] == 3


@pytest.mark.parametrize(("text", "value"), [("None", None), ("2", 2), ("word", "word"), ("a b", "a b")])
def test_a_default_of_none_takes_anything(tmp_path: Path, text: str, value: object) -> None:
    recipe = load(write(tmp_path, GOOD.replace("return Net(width)", "return dropout")), {"dropout": text})
    assert recipe.model() == value


def test_assignments() -> None:
    assert parse_assignments(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(RecipeError, match="--set takes name=value, and 'layers' is not of that form"):
        parse_assignments(["layers"])


# What can be wrong, each in one sentence


def test_unknown_setting_lists_the_known_and_suggests(tmp_path: Path) -> None:
    message = failure(write(tmp_path), widht="3")
    assert "my_recipe.py has no setting 'widht' (did you mean 'width'?); it has model.width = 16" in message
    assert "loss.smoothing = 0.0" in message
    assert "data.seq_len = 8" in message
    assert "did you mean" not in failure(tmp_path / "my_recipe.py", zzz="3")
    assert "no setting 'loss.width'" in failure(tmp_path / "my_recipe.py", **{"loss.width": "3"})
    assert "'split'" in failure(tmp_path / "my_recipe.py", split="test")  # polylane's own to choose


def test_no_settings_at_all(tmp_path: Path) -> None:
    text = "def model(): 0\ndef loss(m, b): 0\ndef optimizer(p): 0\ndef data(s): 0\n"
    assert "nor any other" in failure(write(tmp_path, text), layers="3")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("width", "abc", "model.width in {path} takes a whole number, and 'abc' is not one."),
        ("width", "1.5", "takes a whole number, and '1.5' is not one."),
        ("lr", "fast", "optimizer.lr in {path} takes a number, and 'fast' is not one."),
        ("bias", "maybe", "takes true or false, and 'maybe' is not one."),
        ("shape", "a,b", "takes a list of int such as 2,3, and 'a,b' is not one."),
        ("shape", "1.5,2", "takes a list of int such as 2,3, and '1.5,2' is not one."),
        ("shape", "((", "takes a list of int such as 2,3, and '((' is not one."),
        ("options", "3", "takes a dictionary such as {{'a': 1}}, and '3' is not one."),
    ],
)
def test_bad_value(tmp_path: Path, name: str, value: str, sentence: str) -> None:
    path = write(tmp_path)
    assert sentence.format(path=path) in failure(path, **{name: value})


def test_a_default_that_text_cannot_spell(tmp_path: Path) -> None:
    text = GOOD.replace("width=16", "width=16, kind=Net")
    assert "model.kind in" in failure(write(tmp_path, text), kind="x")
    assert "cannot be set from text: its default is <class" in failure(tmp_path / "my_recipe.py", kind="x")


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("model", "model() -> nn.Module"),
        ("loss", "loss(model, batch) -> Tensor | polylane.Mean"),
        ("optimizer", "optimizer(parameters) -> torch.optim.Optimizer"),
        ("data", "data(split) -> Dataset"),
    ],
)
def test_missing_function(tmp_path: Path, name: str, signature: str) -> None:
    path = write(tmp_path, GOOD.replace(f"def {name}(", f"def other_{name}("))
    assert failure(path) == f"{path} lacks the function {signature}."


def test_several_missing_functions(tmp_path: Path) -> None:
    message = failure(write(tmp_path, "def model(): 0\ndef data(split): 0\n"))
    assert "lacks the functions loss(model, batch)" in message
    assert "; optimizer(parameters)" in message


def test_not_a_function(tmp_path: Path) -> None:
    message = failure(write(tmp_path, GOOD + "\nloss = 3\n"))
    assert "loss in" in message
    assert "is of type int and should be a function loss(model, batch) -> Tensor | polylane.Mean." in message


def test_wrong_arguments(tmp_path: Path) -> None:
    message = failure(write(tmp_path, GOOD.replace("def model(width=16", "def model(width")))
    assert "is called as model() -> nn.Module, and model(width, shape" in message
    assert "missing a required argument: 'width'" in message
    assert "further arguments need defaults" in message
    second = write(tmp_path, GOOD.replace("def data(split, *,", "def data(*,"), "other_recipe.py")
    assert "is called as data(split)" in failure(second)


def test_no_such_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert failure("nowhere/digits.py") == "There is no recipe at nowhere/digits.py."
    assert failure("no_such.module") == "There is no recipe 'no_such.module': neither a Python file nor a module."
    assert failure("json.nowhere") == "There is no recipe 'json.nowhere': neither a Python file nor a module."
    assert "is a folder" in failure(tmp_path)
    (tmp_path / "plan.yaml").write_text("stages: 2")
    assert "plan.yaml is not a Python file" in failure(tmp_path / "plan.yaml")


def test_a_relative_module_name_is_no_recipe() -> None:
    assert "There is no recipe '..digits'" in failure("..digits")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def model(:\n  pass", "my_recipe.py, line 1: SyntaxError: "),
        ("\nx = 1\n  y = 2\n", "my_recipe.py, line 3: IndentationError: unexpected indent."),
        ("x = 1\nimport no_such_package\n", "my_recipe.py, line 2: ModuleNotFoundError: No module named"),
        ("def f():\n    return 1 / 0\n\nf()\n", "my_recipe.py, line 2: ZeroDivisionError: division by zero."),
        ("import json\njson.loads('{')\n", "my_recipe.py, line 2: JSONDecodeError: "),
        ("raise SystemExit(3)\n", "my_recipe.py, line 1: SystemExit: 3."),
        ("raise ValueError('two\\nlines')\n", "my_recipe.py, line 1: ValueError: two lines."),
        ("raise ValueError\n", "my_recipe.py, line 1: ValueError: no message."),
    ],
)
def test_a_recipe_that_does_not_import(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path, text)
    before = list(sys.path)
    assert sentence in failure(path)
    assert "my_recipe" not in sys.modules  # not half imported
    assert sys.path == before
    path.write_text(GOOD)  # mended, it loads
    assert load(path).model().width == 16  # type: ignore[attr-defined]


def test_a_sibling_that_does_not_import(tmp_path: Path) -> None:
    write(tmp_path, "x = 1\ny = x.shape\n", "sibling_of_recipe.py")
    assert "sibling_of_recipe.py, line 2: AttributeError" in failure(write(tmp_path, "import sibling_of_recipe\n"))


def test_a_module_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "x = 1\nimport no_such_package\n", "broken_recipe.py")
    assert failure("broken_recipe").startswith("broken_recipe.py, line 2: ModuleNotFoundError: No module named")
    (tmp_path / "recipe_package").mkdir()
    write(tmp_path / "recipe_package", "1 / 0\n", "__init__.py")
    write(tmp_path / "recipe_package")
    assert (
        failure("recipe_package.my_recipe")
        == "recipe_package/__init__.py, line 1: ZeroDivisionError: division by zero."
    )


# Mean


def test_mean_is_exact_for_unequal_parts() -> None:
    parts = [Mean(torch.tensor(6.0), 2), Mean(torch.tensor(1.0), torch.tensor(3.0))]
    assert sum(float(part.total) for part in parts) / sum(float(part.count) for part in parts) == 7 / 5
    assert parts[0].value == 3.0


def test_no_gradient_flows_through_the_count() -> None:
    weights = torch.ones(3, requires_grad=True)
    mean = Mean(weights.sum(), weights.sum())
    assert mean.total.requires_grad
    assert isinstance(mean.count, torch.Tensor)
    assert not mean.count.requires_grad


def test_a_script_is_refused_before_it_trains(tmp_path: Path) -> None:
    """With the command that takes it; a file that has both, a loop and a recipe's functions, is a recipe."""
    script = tmp_path / "my_loop.py"
    for prepared in (
        "import polylane\nraise SystemExit('it trains')\nmodel = polylane.prepare(model)\n",
        "import polylane as pl\nraise SystemExit('it trains')\nmodel = pl.prepare(model)\n",
        "from polylane import prepare\nraise SystemExit('it trains')\nmodel = prepare(model)\n",
        "from polylane.integrations.transformers import Trainer\nraise SystemExit('it trains')\n",
    ):
        script.write_text(prepared)
        with pytest.raises(
            RecipeError, match=r"my_loop.py has a training loop of its own.* start it with polylane run"
        ):
            load(script)
    script.write_text("import polylane\ndef data(split): ...\ndef main(): polylane.prepare(None)\n")
    with pytest.raises(RecipeError, match="lacks the functions"):
        load(script)
