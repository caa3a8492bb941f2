"""``polylane export``: write the weights of a checkpoint as a plain safetensors file, by the model's own names."""

from __future__ import annotations

import os

from polylane.commands.printing import print_json, print_line
from polylane.commands.requests import ExportRequest
from polylane.errors import PolylaneError, format_plural


def run(request: ExportRequest) -> None:
    """Write the weights and buffers of a checkpoint, each whole, and say what was written.

    Raises:
        PolylaneError: there is no complete checkpoint, it is damaged, or the file is there already or cannot be
            written.
    """
    if os.path.isdir(request.out):
        raise PolylaneError(f"{request.out} is a folder: give the name of a file in it, such as model.safetensors")
    if os.path.lexists(request.out) and not request.force:  # also a link that leads nowhere
        raise PolylaneError(f"{request.out} is there already: give --force to replace it, or another name")
    from polylane.checkpoint.read_tensors import read_weights
    from polylane.checkpoint.store import open_checkpoint
    from polylane.runtime.parameters.broadcast import save_safetensors

    folder, manifest = open_checkpoint(request.checkpoint)
    weights = read_weights(folder, manifest)
    save_safetensors(dict(weights), request.out)
    size = request.out.stat().st_size
    if request.json:
        written = {"file": str(request.out), "bytes": size, "tensors": len(weights)}
        print_json({"checkpoint": str(folder), "step": manifest.step, **written})
        return
    tensors = format_plural(len(weights), "tensor")
    print_line(f"{request.out}: {tensors} of step {manifest.step}, {size:,} bytes, from {folder}")
