"""Checkpoints whose manifests were changed at random, mostly with a digest that is right for the change."""

from __future__ import annotations

import hashlib
import json
import random
import zlib

from fuzzing.mutations import mutate_data, mutate_text
from polylane.checkpoint.manifest import Chunk, Manifest, SavedTensor, format_manifest

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
