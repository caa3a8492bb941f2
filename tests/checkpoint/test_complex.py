"""Complex weights: every bit in checkpoints, whatever plan goes on, and files that load into the plain model."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from polylane.checkpoint.manifest import SavedTensor
from polylane.checkpoint.store import open_checkpoint
from polylane.cli import main
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.parameters.broadcast import save_safetensors
from tests.checkpoint.saved_runs import adam, compile_once, on_workers, train


class Filter(nn.Module):
    """Learned factors of frequencies, one for all of them too, and fixed ones, which are a buffer."""

    def __init__(self, real: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = real.to_complex()
        self.gain, self.head = nn.Parameter(torch.ones(6, dtype=real)), nn.Linear(6, 4, dtype=real)
        self.factors = nn.Parameter(torch.randn(4, dtype=dtype))
        self.common = nn.Parameter(torch.randn((), dtype=dtype))
        self.register_buffer("fixed", torch.randn(4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(x * self.gain) * (self.factors + self.fixed) * self.common
        return self.head(torch.tanh(torch.fft.irfft(frequencies, n=6)))


single, double = functools.partial(Filter, torch.float32), functools.partial(Filter, torch.float64)
Make = Callable[[], nn.Module]
SAVED, OTHER = "data=2,shard=parameters", "pipeline=2,microbatches=1"


def states(plan: str, make: Make, start: Path | None, folder: Path | None = None) -> list[dict[str, Tensor]]:
    """The model's whole state when there are two steps, and after two more."""

    def work(job: Job) -> list[dict[str, Tensor]]:
        if start is None:
            train(job, 2)
        else:
            job.load_checkpoint(start)
        found = [job.state_dict()]
        if folder is not None:
            job.save_checkpoint(folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                job.save(folder / "model.safetensors")
        train(job, 2)
        return [*found, job.state_dict()]

    return on_workers(compile_once(plan, make, adam, None), work)[0]


@dataclass(frozen=True)
class Run:
    """A run without a break: what makes its model, the folder of its checkpoint, and its states there and later."""

    make: Make
    folder: Path
    states: list[dict[str, Tensor]]


@pytest.fixture(scope="module", params=[single, double], ids=["complex64", "complex128"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("complex")
    return Run(request.param, folder, states(SAVED, request.param, None, folder))


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and bytes(a.numpy()) == bytes(b.numpy())
        for a, b in ((one[name], other[name]) for name in one)
    )


def test_the_same_plan_goes_on_bit_for_bit(saved: Run) -> None:
    found = states(SAVED, saved.make, saved.folder)
    assert same_bits(found[0], saved.states[0]) and same_bits(found[1], saved.states[1])


def test_another_plan_has_every_bit_and_goes_on_with_the_same_numbers(saved: Run) -> None:
    loaded, after = states(OTHER, saved.make, saved.folder)
    assert same_bits(loaded, saved.states[0])
    bound = 1e-11 if saved.make is double else 1e-4
    for name, value in after.items():
        torch.testing.assert_close(value, saved.states[1][name], rtol=bound, atol=bound / 100)


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the warning tells a user to do."""
    for name in [each.removesuffix(".imag") for each in state if each.endswith(".imag")]:
        state[name] = torch.complex(state.pop(f"{name}.real"), state.pop(f"{name}.imag"))
    return state


def test_what_is_written_loads_into_the_plain_model(
    saved: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, folder, expected = saved.make, saved.folder, saved.states[0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(SystemExit) as end:
            main(["export", str(folder), str(tmp_path / "exported.safetensors")])
    assert not end.value.code and "6 tensors of step 2" in capsys.readouterr().out
    for path in (tmp_path / "exported.safetensors", folder / "model.safetensors"):
        found = load_file(path)
        if make is single:
            assert not told
        else:
            (sentence,) = [str(each.message) for each in told]
            assert re.match(r"factors and 2 others are torch.complex128, ", sentence)
            # Nothing of it is loaded by mistake: torch would take the first of a pair for a single number.
            with pytest.raises(RuntimeError, match=r"Missing key.*common"):
                make().load_state_dict(found, strict=True)
            found = whole(found)
        assert same_bits(found, expected)
        model = make()
        model.load_state_dict(found, strict=True)
        assert same_bits(dict(model.state_dict()), expected)


def test_the_manifest_says_which_tensors_are_complex(saved: Run) -> None:
    tensors = open_checkpoint(saved.folder)[1].tensors
    names = {name.partition("/")[2] for name, each in tensors.items() if each.is_complex and name[:6] == "model/"}
    assert names == {"factors", "common", "fixed"}
    assert {each.shape[-1] for each in tensors.values() if each.is_complex} == {2}


class Pairs(Filter):
    """Its weights and buffer are the pairs of real numbers."""

    def __init__(self, real: torch.dtype) -> None:
        super().__init__(real)
        for name in ("factors", "common"):
            setattr(self, name, nn.Parameter(torch.view_as_real(getattr(self, name).detach().clone())))
        self.fixed = torch.view_as_real(self.fixed)

    def forward(self, x: Tensor) -> Tensor:
        factors, common, fixed = map(torch.view_as_complex, (self.factors, self.common, self.fixed))
        return self.head(torch.fft.irfft(torch.fft.rfft(x * self.gain) * (factors + fixed) * common, n=6))


def test_a_model_of_real_pairs_is_another_model(saved: Run) -> None:
    def load(job: Job) -> str:
        with pytest.raises(PolylaneError) as refused:
            job.load_checkpoint(saved.folder)
        return str(refused.value)

    make = functools.partial(Pairs, torch.float64 if saved.make is double else torch.float32)
    (said,) = on_workers(compile_once("data=1", make, adam, None), load)
    assert re.search(r"has model/\w+ in complex numbers, expected real ones: it is of another model", said)


@pytest.mark.parametrize(("dtype", "shape"), [("F32", (3,)), ("I32", (2,)), ("F64", ())])
def test_pairs_that_are_none_are_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected pairs of F16, F32, F64 in the last dimension"):
        SavedTensor.model_validate({"dtype": dtype, "shape": shape, "chunks": (), "is_complex": True})


def test_a_lazy_conjugate_is_written_as_it_is(tmp_path: Path) -> None:
    value = torch.randn(3, dtype=torch.complex64)
    save_safetensors({"w": value.conj()}, tmp_path / "w")
    assert torch.equal(load_file(tmp_path / "w")["w"], value.conj())


def test_what_no_file_has_is_one_sentence(tmp_path: Path) -> None:
    taken = {"w": torch.zeros(2, dtype=torch.complex128), "w.real": torch.zeros(2)}
    bits = {"w": torch.zeros(2, dtype=torch.bits8)}
    for state, sentence in ((taken, "w is complex, and would be written as w.real"), (bits, "not have torch.bits8")):
        with pytest.raises(PolylaneError, match=sentence):
            save_safetensors(state, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
