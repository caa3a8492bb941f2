"""Checkpoints whose manifests were changed at random, mostly with a digest that is right for the change."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from polylane.checkpoint.manifest import Chunk, Manifest, SavedTensor, format_manifest
from tests.fuzzing.isolation import FuzzInput, run_here
from tests.fuzzing.mutations import mutate_data, mutate_text
from tests.fuzzing.warm_start import warm_up

_DATA = bytes(range(64))
_HEADER = json.dumps({"model/w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}).encode()
SHARD = len(_HEADER).to_bytes(8, "little") + _HEADER + _DATA
MANIFEST = format_manifest(
    Manifest(
        step=3,
        epoch=0,
        samples=12,
        plan="polylane: 1\nstages:\n- nodes: [0/linear]\n",
        versions={"torch": "2", "polylane": "1"},
        run={"seed": 0},
        weights={"w": "model/w"},
        plain=["d", "replicas", 1],
        files={"rank-00000.safetensors": len(SHARD)},
        tensors={
            "model/w": SavedTensor(
                dtype="F32",
                shape=(4, 4),
                chunks=(
                    Chunk(
                        file="rank-00000.safetensors",
                        key="model/w",
                        offsets=(0, 0),
                        shape=(4, 4),
                        checksum=zlib.crc32(_DATA),
                    ),
                ),
            )
        },
    )
)


def mutate_manifest(draw: random.Random, text: str) -> bytes:
    """Return a manifest with other content, mostly with the digest of that, or with other bytes."""
    if draw.random() < 0.2:
        return mutate_text(draw, text)
    whole = json.loads(text)
    if draw.random() < 0.1:
        whole = mutate_data(draw, whole)
    elif draw.random() < 0.5:
        whole["content"]["plain"] = mutate_data(draw, whole["content"]["plain"])
    else:
        whole["content"] = mutate_data(draw, whole["content"])
    if isinstance(whole, dict) and "content" in whole and draw.random() < 0.95:
        content = json.dumps(whole["content"], separators=(",", ":"))
        whole["digest"] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps(whole).encode("utf-8", "surrogatepass")


def mutated_checkpoint(draw: random.Random) -> dict[str, bytes | None]:
    """Return the files of a checkpoint, of which the manifest or the tensors were changed."""
    shard, manifest = SHARD, MANIFEST.encode()
    if draw.random() < 0.2:
        changed = bytearray(shard)
        changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
        shard = bytes(changed)
    else:
        manifest = mutate_manifest(draw, MANIFEST)
    return {"c/step-00000003/manifest.json": manifest, "c/step-00000003/rank-00000.safetensors": shard}


@functools.cache
def trained_checkpoint(recipe: str) -> Mapping[str, bytes]:
    """Return the files of the checkpoint of a short training, by name."""
    with tempfile.TemporaryDirectory(prefix="polylane-fuzz-") as folder:
        words = ("train", "tiny.py", "--plan", "data=1", "--batch", "12", "--steps", "1", "--save-every", "1")
        outcome = run_here(FuzzInput("", (*words, "--run", folder), {"tiny.py": recipe.encode()}), warm_up())
        assert (outcome.code, outcome.wrong) == (0, ""), outcome
        (saved,) = (Path(folder) / "checkpoints").iterdir()
        return {file.name: file.read_bytes() for file in saved.iterdir()}


def edited_checkpoint(draw: random.Random, files: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return the files of a checkpoint of which a part of the manifest was edited, with a digest that is right."""
    content = json.loads(files["manifest.json"])["content"]
    part = draw.choice(
        ("run", "run", "run", "plain", "plain", "plan", "tensors", "weights", "step", "epoch", "samples")
    )
    content[part] = mutate_data(draw, content[part])
    text = json.dumps(content, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest = f'{{"polylane_checkpoint":1,"digest":"{digest}","content":{text}}}\n'.encode()
    return {f"c/step-00000001/{name}": data for name, data in ({**files, "manifest.json": manifest}).items()}
