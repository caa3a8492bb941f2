"""polylane run and verify of a script: on several workers it prints what it prints alone, and ends as it ends alone."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from polylane.commands.verifying.printed_lines import ChangingNumbers, PrintedFloors, Tolerance, compare_lines
from polylane.commands.verifying.script import is_script
from polylane.commands.why import read_report
from polylane.errors import PolylaneError
from tests.cli.tiny_recipe import FILES, RECIPE, alive, call, execute, metrics, start, wait_for
from tests.support.workers import forked_commands

SCRIPT = """
import argparse, os, sys
import torch, polylane
import torch.nn.functional as F
from torch import nn

def is_first_to_come():
    try:
        os.mkdir(f"came-{os.getppid()}")
    except FileExistsError:
        return False
    return True

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--fault", default="")
    parser.add_argument("--eps", type=float)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.eps:  # the gradient of a bias before a batch normalization is rounding, which Adam makes steps of
        model.insert(1, nn.BatchNorm1d(8).double())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=options.eps)
    if options.fault == "dropout":
        model.insert(1, nn.Dropout(0.5))
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    if options.fault == "forgotten":
        model = polylane.prepare(model)
    elif options.fault != "plain":
        model, optimizer = polylane.prepare(model, optimizer)
    alone = options.fault in ("leave", "look", "draw") and is_first_to_come()
    for epoch in range(options.epochs):
        if alone and options.fault == "leave":
            sys.exit(3)
        if alone and options.fault == "look":
            with torch.no_grad():
                model(x).sum()
        if alone and options.fault == "draw":
            x = torch.randn(12, 4).double()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y[options.fault == "shape" :])
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.9f}")
        print("a warning", file=sys.stderr)
        open(f"rank-{os.environ.get('POLYLANE_RANK')}", "w").close()
        if options.fault == "time":
            import time
            print(f"after {time.time_ns() % 10**9} ns")  # (a whole time differs by less than 1e-9 of it)
        if options.fault == "type":
            print(f"a {type(model).__name__} of {len(type(model).__name__)} letters")
        if options.fault == "raise":
            raise ValueError("a fault of the script's")
        if options.fault == "sleep":
            import time
            print("asleep", flush=True)
            time.sleep(600)
    if options.fault == "exit":
        sys.exit(7)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "tiny_script.py").write_text(SCRIPT)
    return folder


def test_a_script_prints_what_it_prints_alone(scripts: Path) -> None:
    plain, _ = execute(scripts, "tiny_script.py --epochs 2", program=())
    assert plain.count("loss") == 2
    out, err = execute(scripts, "run tiny_script.py --workers 2 -- --epochs 2")
    assert out == plain
    assert "2 workers on cpu, data=2" in err and err.count("a warning") == 2
    line = "run tiny_script.py --plan pipeline=2,microbatches=2 --run run/two -- --epochs 2"
    assert execute(scripts, line)[0] == plain
    assert {file.name for file in scripts.glob("rank-*")} == {"rank-None", "rank-0", "rank-1"}
    run = scripts / "run/two"
    assert {file.name for file in run.iterdir()} == FILES - {"model.safetensors", "run.json"}
    steps, _ = metrics(run)
    assert [step["step"] for step in steps] == [1, 2] and {step["learning_rate"] for step in steps} == {0.1}
    assert f"epoch 1: loss {steps[1]['loss']:.9f}" in plain


def test_a_script_that_is_slower_on_two_workers_is_told_so_at_its_end(scripts: Path) -> None:
    """A step of a few microseconds, which no split makes faster: its speed, what was predicted, and what to do."""
    _, err = execute(scripts, "run tiny_script.py --plan tensor=2 --run run/slow -- --epochs 12")
    said = re.search(
        r"([\d.e-]+) times the speed of one device, on 2 workers \((\S+) ms a step, (\S+) ms predicted\)", err
    )
    assert said is not None and float(said.group(1)) < 1, err
    *_, advice = err.splitlines()
    assert re.match(
        "polylane: one worker is likely to be faster, with .* ms a step predicted: leave out --plan", advice
    )
    apart = "a step takes .* times what was predicted: other programs keep this machine busy, or the step is so short"
    assert float(said.group(2)) > 3 * float(said.group(3)) and re.search(apart, err)
    goodput = json.loads((scripts / "run/slow/goodput.json").read_text())
    assert len(goodput["advice"]) == 2 and goodput["verdict"] in err


def test_a_script_logs_its_gradient_noise(scripts: Path) -> None:
    """And prints the same numbers beside it."""
    plain, _ = execute(scripts, "tiny_script.py --epochs 2", program=())
    for plan in ("data=2", "pipeline=2,microbatches=2", "data=2,shard=parameters"):
        line = f"run tiny_script.py --plan {plan} --noise on --run run/noisy -- --epochs 2"
        assert execute(scripts, line)[0] == plain
        steps, _ = metrics(scripts / "run/noisy")
        assert [step["noise"]["parts"] for step in steps] == [2] * len(steps) and len(steps) >= 2
        assert all(step["noise"]["population"] is None for step in steps)  # its data are not known


def test_what_a_script_says_of_its_gradient_noise_is_by_its_option(scripts: Path) -> None:
    """off: nothing; on: why it cannot be measured; auto: nothing there, and the script runs."""
    alone = "tiny_script.py --plan data=1,pipeline=2,microbatches=1"
    execute(scripts, "run tiny_script.py --plan data=2 --noise off --run run/quiet -- --epochs 2")
    assert not any("noise" in step for step in metrics(scripts / "run/quiet")[0])
    assert "no parts of it to compare" in execute(scripts, f"run {alone} --noise on", code=2)[1]
    execute(scripts, f"run {alone} --run run/alone -- --epochs 2")
    assert not any("noise" in step for step in metrics(scripts / "run/alone")[0])


def test_alone_and_without_a_plan_a_script_runs_as_it_is(scripts: Path) -> None:
    out, err = execute(scripts, "run tiny_script.py")
    assert out.startswith("epoch 0: loss") and err == "a warning\n"


def test_a_script_ends_with_its_code(scripts: Path) -> None:
    assert execute(scripts, "run tiny_script.py --workers 2 -- --fault exit", code=7)[0].startswith("epoch 0: loss")
    _, err = execute(scripts, "run tiny_script.py --workers 2 -- --epoch x", code=2)
    assert err.count("usage: tiny_script.py") == 1


def test_an_optimizer_that_was_not_prepared_is_named_once(scripts: Path) -> None:
    plain, _ = execute(scripts, "tiny_script.py --epochs 3", program=())
    out, err = execute(scripts, "run tiny_script.py --workers 2 -- --epochs 3 --fault forgotten")
    assert out == plain
    assert len(re.findall(r"tiny_script.py:\d+: every worker makes all of this SGD's update", err)) == 1


def test_a_script_without_a_prepared_optimizer_ends_with_its_audit_and_page(scripts: Path) -> None:
    """Its step ends where it first writes a weight after backward()."""
    line = "run tiny_script.py --workers 2 --run run/forgotten -- --fault forgotten --epochs 3"
    _, err = execute(scripts, line)
    assert re.search(r"polylane: 3 steps; audited at 1 step: the same numbers.*; run/forgotten/: ", err)
    steps, _ = metrics(scripts / "run/forgotten")
    assert [step["step"] for step in steps] == [1, 2, 3] and {step["learning_rate"] for step in steps} == {None}


def test_an_exception_is_shown_once_from_the_line_of_the_script_on(scripts: Path) -> None:
    _, err = execute(scripts, "run tiny_script.py --workers 2 -- --fault raise", code=1)
    assert err.count("Traceback") == 1 and "failed" in err
    frames = err[err.index("Traceback") :].splitlines()
    assert 'File "tiny_script.py"' in frames[1] and frames[-1] == "ValueError: a fault of the script's"
    _, err = execute(scripts, "run tiny_script.py --workers 2 -- --fault shape", code=1)
    assert "Expected input batch_size (12) to match target batch_size (11)" in err and "polylane/" not in err


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        pytest.param("leave", r"the end of the script.*every rank must call loss\.backward"),
        pytest.param("look", r"model \(tiny_script.py line \d+\).*every rank must call model", marks=pytest.mark.slow),
        pytest.param("draw", r"step 1: rank 1 gave another batch than rank 0", marks=pytest.mark.slow),
    ],
)
def test_workers_whose_scripts_part_are_named(scripts: Path, fault: str, sentence: str) -> None:
    _, err = execute(scripts, f"run tiny_script.py --workers 2 -- --epochs 3 --fault {fault}", code=2)
    assert re.search(sentence, err)


def test_ctrl_c_ends_a_script_and_its_workers(scripts: Path) -> None:
    process = start(scripts, "run tiny_script.py --workers 2 -- --fault sleep")
    assert process.stdout is not None
    wait_for(lambda: "asleep" in process.stdout.readline(), process)  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err
    wait_for(lambda: not alive(process.pid))


@pytest.mark.parametrize(("code", "number"), [(75, signal.SIGTERM), (0, signal.SIGUSR1)])
def test_a_signal_ends_a_script_that_saves_with_the_code_of_a_batch_system(
    scripts: Path, code: int, number: signal.Signals
) -> None:
    """As it ends a recipe's training: with a checkpoint, from which the script is resumed."""
    (scripts / "long.py").write_text(
        "import time, torch, polylane\nfrom torch import nn\n"
        "model = nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8)\n"
        "model, optimizer, loader = polylane.prepare(model, optimizer, loader)\n"
        "for epoch in polylane.epochs(range(1000)):\n"
        "    for x in loader:\n"
        "        optimizer.zero_grad()\n        loss = model(x).square().mean()\n"
        "        loss.backward()\n        optimizer.step()\n        time.sleep(0.05)\n"
        "    print('epoch', epoch, flush=True)\n"
    )
    line = f"run long.py --workers 2 --save-every 4 --requeue-code {code} --run run/long-{code} --resume auto"
    for is_resumed in (False, True):
        process = start(scripts, line)
        assert process.stdout is not None
        wait_for(lambda stdout=process.stdout: "epoch" in stdout.readline(), process)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert re.search(rf"{number.name}: ended after \d+ steps, with a checkpoint: resume with --resume auto", err)
        assert ("resumes from" in err) == is_resumed
        assert bool(re.search(r"\d+ steps \(\d+ since the checkpoint of step \d+\); ", err)) == is_resumed
    with pytest.raises(PolylaneError, match=f"has no report: it was ended by {number.name}, and none of its workers"):
        read_report(scripts / f"run/long-{code}")


def test_workers_of_torchrun_save_and_resume_a_script(scripts: Path) -> None:
    """Rank 0 alone looks at the run's folder, and all of them save into it."""
    (scripts / "short.py").write_text(
        "import sys, torch, polylane\nfrom torch import nn\n"
        "torch.manual_seed(0)\nmodel = nn.Linear(4, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=8)\n"
        "model, optimizer, loader = polylane.prepare(model, optimizer, loader)\n"
        "for epoch in polylane.epochs(range(int(sys.argv[1]))):\n"
        "    for x in loader:\n"
        "        optimizer.zero_grad()\n        loss = model(x).square().mean()\n"
        "        loss.backward()\n        optimizer.step()\n"
        "    print('epoch', epoch, flush=True)\n"
    )
    line = "run short.py --plan data=2 --save-every 1 --resume auto --run run/short -- "
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "polylane"]
    # The last checkpoint of the first run is that of the end of its last pass, before that is printed.
    for epochs, printed in ((2, ["epoch 0", "epoch 1"]), (3, ["epoch 1", "epoch 2"])):
        done = forked_commands.run([*torchrun, *line.split(), str(epochs)], cwd=scripts)
        assert done.returncode == 0, done.stderr
        assert [said for said in done.stdout.splitlines() if said.startswith("epoch")] == printed


def test_a_scripts_own_exit_code_is_no_signal(scripts: Path) -> None:
    """128 is that of the signal 0, which nobody sends."""
    (scripts / "leaves.py").write_text("import sys, polylane\nsys.exit(128)\n")
    execute(scripts, "run leaves.py --plan data=2 --save-every 4 --run run/leaves", code=128)


def test_a_script_that_prepares_nothing_is_refused_at_its_end(scripts: Path) -> None:
    _, err = execute(scripts, "run tiny_script.py --workers 2 -- --fault plain", code=2)
    assert "without a call of polylane.prepare, and each of the 2 workers ran all of it" in err


def test_wrong_scripts_and_options_start_nothing(scripts: Path) -> None:
    broken = scripts / "broken.py"
    broken.write_text("if True\n")
    for words, sentence in {
        (broken,): f"{broken}, line 1: SyntaxError: expected ':'",
        (scripts / "missing.py",): f"script {scripts / 'missing.py'}: No such file or directory",
        (scripts / "tiny_script.py", "--plan", "auto"): "--plan auto needs --workers N",
        (
            scripts / "tiny_script.py",
            "--epochs",
            "3",
        ): "--epochs (the script's own arguments follow --)",
        (scripts / "tiny_script.py", "--workers", "3", "--plan", "data=2"): "--workers 3, but the plan takes 2",
    }.items():
        refused = call("run", *words)
        assert refused.exit_code == 2 and sentence in refused.stderr


@pytest.mark.parametrize(
    ("inputs", "labels", "said"),
    [
        (7, 6, "mat1 and mat2 shapes cannot be multiplied (6x8 and 7x5)"),
        (8, 3, "Expected input batch_size (6) to match target batch_size (3)"),
    ],
)
def test_a_mistake_in_shapes_is_told_in_torchs_words(scripts: Path, inputs: int, labels: int, said: str) -> None:
    """And not in those that it has for tensors without numbers, with what it logs of them."""
    (scripts / "mistaken.py").write_text(
        "import torch, polylane\nfrom torch import nn\n"
        f"model = nn.Sequential(nn.Linear(4, 8), nn.Linear({inputs}, 5))\n"
        "model, optimizer = polylane.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        f"loss = nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.zeros({labels}).long())\n"
        "loss.backward()\noptimizer.step()\nprint(loss.item())\n"
    )
    _, err = execute(scripts, "run mistaken.py --plan data=2 --run run/mistaken", code=1)
    assert said in err and "fake" not in err and "_ops.py" not in err


def test_verify_compares_what_a_script_prints_and_its_weights(scripts: Path) -> None:
    out, _ = execute(scripts, "verify tiny_script.py --plan pipeline=2,microbatches=2 -- --epochs 2 --fault time")
    assert "plain and on 2 workers, in float64" in out
    assert "and the plain script agree in 4 printed numbers and 4 weights" in out and "2 numbers not compared" in out
    out, _ = execute(scripts, "verify tiny_script.py --workers 2 -- --fault type", code=1)
    assert "NOT equal: 2 workers" in out
    assert "line 2 is 'a PreparedModel of 13 letters', not 'a Sequential of 10 letters' of what it prints" in out


def test_random_numbers_that_are_the_plans_are_said_once(scripts: Path) -> None:
    _, err = execute(scripts, "run tiny_script.py --plan data=2 --run run/drawing -- --epochs 3 --fault dropout")
    assert err.count("the random numbers of model.1 are drawn by step and sample: every plan draws the same") == 1
    _, err = execute(scripts, "run tiny_script.py --plan data=2 --run run/quiet -- --epochs 1")
    assert "random numbers" not in err


def test_verify_of_a_script_that_raises_shows_what_it_raises(scripts: Path) -> None:
    (scripts / "raises.py").write_text("import polylane\npolylane.prepare\nraise RuntimeError('of its own')\n")
    _, err = execute(scripts, "verify raises.py --plan data=2", code=1)
    assert err.count("RuntimeError: of its own") == 1 and "script_runs.py" not in err


def test_verify_compares_dropout_with_the_plan_on_one_worker(scripts: Path) -> None:
    out, _ = execute(scripts, "verify tiny_script.py --plan data=2 -- --epochs 2 --fault dropout")
    assert "and the prepared script on one worker (it draws random numbers) agree in 4 printed numbers" in out


def test_verify_tells_rounding_from_a_difference(scripts: Path) -> None:
    out, _ = execute(scripts, "verify tiny_script.py --plan data=2 -- --epochs 3 --eps 1e-11")
    assert "agree in 6 printed numbers and " in out and "no more than rounding explains: 0.0.bias" in out
    out, _ = execute(scripts, "verify tiny_script.py --plan data=2 -- --epochs 3 --eps 1e-30", code=1)
    assert re.search(
        r"Undecided: .* and so do two runs .* off by one unit .* By the plan .*0.0.bias differs by \S+ when the script "
        r"ends; between those two runs it differs by \S+, and 1e-09 would be rounding in float64.* fewer steps",
        out,
    )


def test_verify_refuses_gradients_that_are_rounded_on_their_way(scripts: Path) -> None:
    _, err = execute(scripts, "verify tiny_script.py --plan data=2,wire=bfloat16", code=2)
    assert "wire=bfloat16: gradients lose digits on their way" in err and "leave it out" in err


def test_numbers_are_compared_line_by_line() -> None:
    tolerance = Tolerance(1e-9, 1e-12)
    plain = ["loss 0.5, 3 s", "done", "loss nan 1e-17"]
    same = compare_lines(plain, ["loss 0.50000000001, 4 s", "done", "loss nan 3e-17"], tolerance, ChangingNumbers())
    assert same.difference == "line 1 is 'loss 0.50000000001, 4 s', not 'loss 0.5, 3 s'" and same.numbers == 4
    changing = ChangingNumbers.between(plain, ["loss 0.5, 7 s", "done", "loss nan 1e-17"])
    same = compare_lines(plain, ["loss 0.50000000001, 4 s", "done", "loss nan 3e-17"], tolerance, changing)
    assert not same.difference and (same.numbers, same.left_out) == (3, 1) and 0 < same.worst < 1e-10
    assert compare_lines(plain, plain[:2], tolerance, changing).difference == "line 3 is missing: 'loss nan 1e-17'"
    assert compare_lines(["a"], ["a", "b"], tolerance, changing).difference == "line 2 is one too many: 'b'"


def test_a_difference_counts_as_rounding_up_to_what_rounding_alone_makes() -> None:
    tolerance, plain = Tolerance(1e-9, 1e-12), ["loss 1.0 and 2.0"]
    for nudged, line, rounded, is_equal in (
        ("loss 1.000000001 and 2.0", "loss 1.00000005 and 2.0", 1, True),
        ("loss 1.000000001 and 2.0", "loss 1.0 and 2.0000001", 0, False),  # that number was not moved
        ("loss 1.000000001 and 2.0", "loss 1.0000002 and 2.0", 0, False),  # by more than 100 times that
        ("loss 1.1 and 2.0", "loss 1.01 and 2.0", 0, False),  # numbers that say nothing are not excused
    ):
        floors = PrintedFloors.between(plain, [plain, [nudged]], tolerance)
        found = compare_lines(plain, [line], tolerance, ChangingNumbers(), floors)
        assert (found.rounded, not found.difference) == (rounded, is_equal), line
    assert found.floor == pytest.approx(0.1 / 1.1)


def test_a_script_is_known_by_its_text(tmp_path: Path) -> None:
    for text, is_one in {
        SCRIPT: True,
        RECIPE: False,
        "from polylane import prepare as p\nmodel = p(3)": True,
        "from polylane import Mean\ndef model(): ...\ndef loss(model, batch): ...": False,
        "import polylane, trainer\ntrainer.main()": True,
        "import numpy\nnumpy.prepare()": False,
    }.items():
        (tmp_path / "file.py").write_text(text)
        assert is_script(str(tmp_path / "file.py")) == is_one, text
    assert not is_script("package.module")
