"""Run on the pretended device: captured code is checked there, and the model is back on the host afterwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.capture import self_check
from polylane.graph.capture.capture import capture
from polylane.profiling.time_operators import measure_both
from polylane.runtime.data.read_digest import digest_leaves
from polylane.runtime.transport.staged import HostStaging

DEVICE, CPLX = torch.device("cuda", 0), torch.complex128


class Network(nn.Module):
    """Layers whose forward makes a tensor on the device of its input; with ``stray``, one that stays on the host."""

    def __init__(self, stray: bool) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.stray = torch.ones(8) if stray else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x)) + torch.arange(8, device=x.device)
        return self.outer(hidden if self.stray is None else hidden * self.stray)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def capture_on_device(stray: bool, short: bool = False) -> set[str]:
    """Capture and time a network with the device for its checks; return the types of devices that steps ran on."""
    torch.manual_seed(0)
    model = Network(stray)
    batch = torch.randn(8, 6), torch.arange(8) % 3
    before = {name: (id(t), t.data_ptr(), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    seen, run_steps = set[str](), self_check._run_steps

    def recorded(whole, run, batches):
        found = {leaf.device.type for leaf in batches[0] if isinstance(leaf, Tensor)}
        if short and "cuda" in found:
            raise torch.OutOfMemoryError("no memory")
        seen.update(found)
        return run_steps(whole, run, batches)

    self_check._run_steps = recorded
    try:
        graph = capture(model, loss, batch, check_device=DEVICE)
    finally:
        self_check._run_steps = run_steps
    plain = capture(model, loss, batch)
    assert [node.name for node in graph.nodes] == [node.name for node in plain.nodes]
    assert graph.notes == plain.notes and not graph.is_opaque
    seconds = measure_both(graph, model, loss, list(batch), device=DEVICE)
    assert len(seconds) == len(graph.nodes) and all(forward > 0 for forward, _ in seconds)
    after = {name: (id(t), t.data_ptr(), t) for name, t in model.state_dict(keep_vars=True).items()}
    for name, (identity, memory, value) in before.items():
        assert after[name][:2] == (identity, memory), f"{name} is another tensor"
        assert torch.equal(after[name][2], value) and after[name][2].grad is None, f"{name} has changed"
    return seen


def check_digests() -> None:
    """What one rank reads on the host and another on the device has one digest."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 3, 8, generator=generator, dtype=torch.float64)
    for value in (values, values.float()[:, 1], values.bfloat16(), values > 0, (values * 9).long(), values.to(CPLX)):
        for turn in range(3):
            on_device = digest_leaves([value.to(DEVICE), 1, value], turn, DEVICE)
            assert isinstance(on_device, Tensor) and on_device.device.type == "cuda"
            assert int(on_device) == digest_leaves([value, 1, value], turn, DEVICE), value.dtype
            assert int(on_device) == int(digest_leaves([value.to(DEVICE), 1, value], turn, torch.device("cpu")))


def check_order_of_copies() -> None:
    """Copies that do not block are done in their order, and what is copied to the host is not there before its wait."""
    host, on_device = torch.arange(3.0), torch.zeros(3, device=DEVICE)
    staging = HostStaging(DEVICE)
    pending = staging.begin_to_host(staging.write_back(host, on_device))
    on_device.zero_()  # later on the stream
    assert torch.equal(pending.wait(), host)
    unread = torch.zeros(3).copy_(on_device, non_blocking=True)
    assert not torch.equal(unread, torch.zeros(3)), "copied before anybody waited"
    torch.accelerator.synchronize(DEVICE)
    assert torch.equal(unread, torch.zeros(3))


if __name__ == "__main__":
    check_order_of_copies()
    check_digests()
    assert capture_on_device(stray=False) == {"cuda"}
    assert "cpu" in capture_on_device(stray=True)
    assert capture_on_device(stray=False, short=True) == {"cpu"}
    print("checked")
