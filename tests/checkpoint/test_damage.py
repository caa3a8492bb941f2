"""A checkpoint that is damaged, edited or of another training: one sentence on every worker, and no worker waits."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polylane.checkpoint.commit import MANIFEST
from polylane.checkpoint.store import CheckpointStore, open_checkpoint
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.state.plain_values import numpy_state
from tests.checkpoint.saved_runs import (
    adam,
    compile_once,
    decaying,
    grouped,
    halving,
    momentum,
    on_workers,
    save_steps,
    small_model,
)

PLAN = "data=2,shard=optimizer"
SHARD = "rank-00001.safetensors"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, of which the damaged ones are copies."""
    folder = tmp_path_factory.mktemp("saved")
    save_steps(PLAN, folder, 1, 2)
    return folder


def change_digest(folder: Path) -> None:
    """Change one digit of the manifest's digest to another one."""
    before, key, rest = (folder / MANIFEST).read_text().partition('"digest":"')
    assert key
    (folder / MANIFEST).write_text(before + key + ("1" if rest[0] == "0" else "0") + rest[1:])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def edit(path: Path, change: Callable[[Any], None], digest: bool = False) -> None:
    """Edit a manifest's content; with a digest that is right for it, where that is asked for."""
    whole = json.loads(path.read_text())
    change(whole["content"])
    if digest:
        text = json.dumps(whole["content"], separators=(",", ":"))
        whole["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(whole))


DAMAGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a byte of a tensor": (
        lambda f: flip(f / SHARD, -5),
        (SHARD, "its checksum is", "expected", "take another", "step-"),
    ),
    "a byte of a header": (lambda f: flip(f / SHARD, 12), (SHARD, "is damaged", "expected", "found", "take another")),
    "the length of a header": (lambda f: flip(f / SHARD, 0), (SHARD, "is damaged", "expected", "found")),
    "a file cut off": (
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-9]),
        (SHARD, "bytes, expected", "it holds", "take another checkpoint, such as", "step-00000001"),
    ),
    "a file missing": (lambda f: (f / SHARD).unlink(), (SHARD, "No such file", "expected", "it holds")),
    "a manifest cut off": (
        lambda f: (f / MANIFEST).write_bytes((f / MANIFEST).read_bytes()[:-40]),
        (MANIFEST, "is no JSON", "cut off or edited"),
    ),
    "a manifest missing": (lambda f: (f / MANIFEST).unlink(), (MANIFEST, "there is no")),
    "a manifest of bytes": (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\0"), (MANIFEST, "cannot be read")),
    "a field": (
        lambda f: edit(f / MANIFEST, lambda c: c.update(step=7)),
        (MANIFEST, "was changed after it was written", "its digest is", "expected"),
    ),
    "the digest": (change_digest, (MANIFEST, "was changed after it was written", "expected")),
    "another version": (
        lambda f: (f / MANIFEST).write_text(
            (f / MANIFEST).read_text().replace('{"polylane_checkpoint":1', '{"polylane_checkpoint":2')
        ),
        (MANIFEST, "its form is '2'", "reads form 1"),
    ),
    "another key": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace('"digest"', '"dogest"')),
        (MANIFEST, "dogest", "expected"),
    ),
    "a field, with a digest": (
        lambda f: edit(f / MANIFEST, lambda c: c.update(step=-1), digest=True),
        (MANIFEST, "step"),
    ),
    "a shape, with a digest": (
        lambda f: edit(f / MANIFEST, lambda c: c["tensors"]["model/0.weight"].update(shape=[6, 8]), digest=True),
        (MANIFEST, "model/0.weight"),
    ),
    "a large shape, with a digest": (
        lambda f: edit(f / MANIFEST, lambda c: enlarge(c["tensors"]["model/0.weight"]), digest=True),
        (MANIFEST, "model/0.weight", "bytes in"),
    ),
    "chunks that overlap, with a digest": (
        lambda f: edit(f / MANIFEST, lambda c: overlap(c["tensors"]["model/0.weight"]), digest=True),
        (MANIFEST, "model/0.weight", "its element [2, 0] is in", "expected each element in one chunk"),
    ),
    "the same bytes twice, with a digest": (
        lambda f: edit(f / MANIFEST, lambda c: repeat(c["tensors"]["model/0.weight"]), digest=True),
        (MANIFEST, "model/0.weight", "bytes in", "of other tensors or chunks"),
    ),
    "a manifest without an end": (
        lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).symlink_to("/dev/zero")),
        (MANIFEST, "this is no file"),
    ),
    "replicas of other shapes, with a digest": (
        lambda f: edit(f / MANIFEST, disagree, digest=True),
        (MANIFEST, "weights.0.weight", "2 forms, expected one"),
    ),
    "a dtype, with a digest": (
        lambda f: edit(f / MANIFEST, lambda c: c["tensors"]["model/0.weight"].update(dtype="I64"), digest=True),
        ("model/0.weight", "torch.int64", "expected torch.float64"),
    ),
    "a file of another folder": (
        lambda f: edit(
            f / MANIFEST, lambda c: c["tensors"]["model/0.weight"]["chunks"][0].update(file="../x"), digest=True
        ),
        (MANIFEST, "model/0.weight", "file"),
    ),
    "plain state": (
        lambda f: edit(f / MANIFEST, lambda c: c.update(plain=["l", 1]), digest=True),
        (MANIFEST, "plain is a list", "expected"),
    ),
    "encoded state": (
        lambda f: edit(f / MANIFEST, lambda c: c.update(plain=["o", "os.system", "id"]), digest=True),
        (MANIFEST, "plain", "no encoded value"),
    ),
    "a state's type": (
        lambda f: edit(f / MANIFEST, lambda c: replace_text(c, "torch.float64", "torch.nonsense"), digest=True),
        ("cannot be restored", "nonsense", "was edited"),
    ),
}


def enlarge(tensor: Any) -> None:
    tensor["shape"] = tensor["chunks"][0]["shape"] = [1 << 40, 6]
    tensor["chunks"][0]["offsets"] = [0, 0]
    del tensor["chunks"][1:]


def overlap(tensor: Any) -> None:
    """Let two chunks have as many elements as the tensor, with two rows in both, and two in none."""
    (chunk,) = tensor["chunks"]
    tensor["chunks"] = [{**chunk, "offsets": [first, 0], "shape": [4, 6]} for first in (0, 2)]


def repeat(tensor: Any) -> None:
    """Let a tensor be a thousand times as large, of chunks that all are the same bytes of the file."""
    (chunk,) = tensor["chunks"]
    rows, columns = tensor["shape"]
    tensor["shape"] = [rows * 1000, columns]
    tensor["chunks"] = [{**chunk, "offsets": [rows * turn, 0]} for turn in range(1000)]


def disagree(content: Any) -> None:
    """Let a weight be held by two replicas, whose tensors have other shapes."""
    for replica, name in enumerate(("model/0.weight", "model/0.bias")):
        content["tensors"][f"odd@{replica}"] = content["tensors"][name]
    content["weights"]["0.weight"] = "odd"


def replace_text(content: Any, old: str, new: str) -> None:
    content["plain"] = json.loads(json.dumps(content["plain"]).replace(old, new))


@pytest.fixture(scope="module")
def said(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By damage, what each worker said; one team of workers tries all."""
    root = tmp_path_factory.mktemp("damaged")
    for name, (change, _) in DAMAGES.items():
        shutil.copytree(saved, root / name)
        change(root / name / "step-00000002")

    def work(job: Job) -> dict[str, str]:
        return {name: try_to_load(job, root / name / "step-00000002") for name in DAMAGES}

    every = on_workers(compile_once(PLAN), work)
    return {name: [each[name] for each in every] for name in DAMAGES}


def try_to_load(job: Job, path: Path) -> str:
    try:
        job.load_checkpoint(path)
    except PolylaneError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_sentence_on_every_worker(name: str, said: dict[str, list[str]]) -> None:
    first, second = said[name]
    assert first == second
    assert "\n" not in first
    assert "step-00000002" in first
    for word in DAMAGES[name][1]:
        assert word in first, first


def test_each_byte_of_a_small_file_is_watched(saved: Path, tmp_path: Path) -> None:
    save_steps("data=1", tmp_path / "own", 1)
    folder = tmp_path / "own" / "step-00000001"
    shard = folder / "rank-00000.safetensors"
    whole = shard.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")

    def work(job: Job) -> list[int]:
        unseen = []
        for at in (*range(0, header, 11), *range(header, len(whole), 97)):
            flip(shard, at)
            if not try_to_load(job, folder):
                unseen.append(at)
            shard.write_bytes(whole)
        assert not try_to_load(job, folder)
        return unseen

    (unseen,) = on_workers(compile_once("data=1"), work)
    assert [whole[at - 20 : at + 5] for at in unseen] == []


def test_resume_auto_takes_the_newest_that_is_whole(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(saved, root)
    store = CheckpointStore(root)
    assert store.find_newest() == root / "step-00000002"
    for torn in ("a file cut off", "a file missing", "a manifest cut off", "a manifest missing", "the digest"):
        shutil.rmtree(root / "step-00000002")
        shutil.copytree(saved / "step-00000002", root / "step-00000002")
        DAMAGES[torn][0](root / "step-00000002")
        assert store.find_newest() == root / "step-00000001", torn
    (root / ".step-00000009.0123abcd").mkdir()
    (root / "step-00000008").mkdir()
    assert store.find_newest() == root / "step-00000001"


def test_a_run_without_checkpoints_says_how_to_have_some(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(PolylaneError, match=r"has written no checkpoint: train with --save-every STEPS to have some$"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(PolylaneError, match=r"to have some; the weights .* are in .*model\.safetensors$"):
        open_checkpoint(tmp_path)


def test_where_none_is_whole_each_is_named_by_a_sentence(saved: Path, tmp_path: Path) -> None:
    """Also where an earlier one lacks a file: whoever looks for another one to name passes over it."""
    root = tmp_path / "checkpoints"
    shutil.copytree(saved, root)
    for folder in root.iterdir():
        DAMAGES["a file missing"][0](folder)
    assert CheckpointStore(root).find_newest() is None
    with pytest.raises(PolylaneError, match="none of the checkpoints in it is complete"):
        open_checkpoint(root)
    with pytest.raises(PolylaneError, match=f"{SHARD}.*No such file.*has no other complete one"):
        open_checkpoint(root / "step-00000002")


OTHERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "other shape": (
        lambda: compile_once(PLAN, lambda: small_model(10)),
        ("model/0.weight", "[8, 6]", "expected [10, 6]"),
    ),
    "other dtype": (
        lambda: compile_once(PLAN, lambda: small_model(dtype=torch.float32)),
        ("model/0.weight", "torch.float64", "expected torch.float32"),
    ),
    "one less": (lambda: compile_once(PLAN, lambda: small_model(bias=False)), ("4.bias", "[4]", "expected no such")),
    "one more": (lambda: compile_once(PLAN, with_more), ("model/6.weight", "expected in the shape [4, 4]")),
    "other optimizer": (
        lambda: compile_once(PLAN, optimizer=adam),
        ("the optimizer SGD", "expected the optimizer Adam"),
    ),
    "other groups": (lambda: compile_once(PLAN, optimizer=grouped), ("has 1", "there are 2", "optimizer")),
    "other scheduler": (
        lambda: compile_once(PLAN, scheduler=decaying),
        ("StepLR", "expected the scheduler ExponentialLR"),
    ),
    "no scheduler": (lambda: compile_once(PLAN, scheduler=None), ("StepLR", "expected no scheduler")),
}


def with_more() -> torch.nn.Module:
    return torch.nn.Sequential(*small_model(), torch.nn.Tanh(), torch.nn.Linear(4, 4).double())


@pytest.mark.parametrize("name", OTHERS)
def test_another_training_is_refused(name: str, saved: Path) -> None:
    make, words = OTHERS[name]
    first, second = on_workers(make(), lambda job: try_to_load(job, saved / "step-00000002"))
    assert first == second
    assert "step-00000002" in first
    for word in words:
        assert word in first, first


def test_the_same_training_loads(saved: Path) -> None:
    prepared = compile_once(PLAN, small_model, momentum, halving)
    assert on_workers(prepared, lambda job: try_to_load(job, saved)) == ["", ""]


@pytest.mark.parametrize(
    "state",
    [
        ("MT19937", [0] * 624, 10**9, 0, 0.0),
        ("MT19937", [0] * 624, -1, 0, 0.0),
        ("MT19937", [0] * 600, 610, 0, 0.0),
        ("PCG64", [0] * 624, 0, 0, 0.0),
    ],
)
def test_numpys_generator_takes_no_place_outside_of_its_numbers(state: tuple[Any, ...]) -> None:
    """It would read other memory there, or end the process."""
    with pytest.raises(PolylaneError, match="NumPy's random generator"):
        numpy_state(state)
    kind, keys, place, *rest = np.random.RandomState(7).get_state()
    np.random.RandomState().set_state(numpy_state((kind, keys.tolist(), place, *rest)))
