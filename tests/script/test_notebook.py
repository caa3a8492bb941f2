"""launch() in a real Jupyter kernel: a model of one cell is trained in the next, by workers."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import polylane

SOURCE = Path(polylane.__file__).parents[1]

CELLS = {
    "train": """
        import torch, polylane
        import torch.nn.functional as F

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
        x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))

        def train(steps):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            model, optimizer = polylane.prepare(net, optimizer)
            losses = []
            for step in range(steps):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                print(f"step {step}: {losses[-1]:.9f}")
            return losses

        launched = polylane.launch(train, 3, workers=2, plan="data=2")
        plain = train(3)
        assert max(abs(a - b) for a, b in zip(launched, plain, strict=True)) < 1e-12
    """,
    "stream": """
        import os, time

        def wait_for_reader():
            print("is anybody there?")
            while not os.path.exists("reader"):
                time.sleep(0.05)
            return "yes"

        polylane.launch(wait_for_reader, workers=2)
    """,
    "fail": """
        def divide(number):
            return 1 / number

        polylane.launch(divide, 0, workers=2)
    """,
    "interrupt": """
        polylane.launch(time.sleep, 600, workers=2)
    """,
    "left": """
        import multiprocessing
        multiprocessing.active_children()
    """,
}


def test_launch_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    class Reader(nbclient.NotebookClient):
        """Executes a notebook, and lets what waits for its reader know that this has read it."""

        def output(self, outs: Any, msg: Any, display_id: str, cell_index: int) -> Any:
            if "is anybody there?" in msg["content"].get("text", ""):
                (tmp_path / "reader").touch()
            return super().output(outs, msg, display_id, cell_index)

    cells = {name: nbformat.v4.new_code_cell(dedent(text)) for name, text in CELLS.items()}
    Reader(
        nbformat.v4.new_notebook(cells=list(cells.values())),
        resources={"metadata": {"path": str(tmp_path)}},
        allow_errors=True,
        timeout_func=lambda cell: 3 if cell is cells["interrupt"] else 240,
        interrupt_on_timeout=True,
    ).execute()
    outputs = {name: cell.outputs for name, cell in cells.items()}

    printed = "".join(output.text for output in outputs["train"] if output.get("name") == "stdout").split("\n")
    assert printed[:3] == printed[3:6] and printed[2].startswith("step 2: ")
    assert [output.output_type for output in outputs["train"] if output.output_type == "error"] == []
    assert outputs["stream"][-1]["data"]["text/plain"] == "'yes'"
    error = outputs["fail"][-1]
    assert error.ename == "WorkerFailed" and error.evalue.count("Traceback") == 1
    assert error.evalue.rstrip().endswith("ZeroDivisionError: division by zero")
    assert outputs["interrupt"][-1].ename == "KeyboardInterrupt"
    assert outputs["left"][-1]["data"]["text/plain"] == "[]"
