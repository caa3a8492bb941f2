"""Links and their presets."""

import pydantic
import pytest

from polylane.cluster.catalogue import device_presets, link_presets, usual_links
from polylane.cluster.link import Link

PRESETS = {name: Link.model_validate(figures) for name, figures in link_presets().items()}


def test_every_device_of_a_switch_has_its_bandwidth_whatever_their_number() -> None:
    link = Link(bandwidth=100e9, latency=1e-6, fraction=0.8)
    assert {link.solo_bandwidth("all_reduce", devices) for devices in (2, 3, 8, 100)} == {80e9}
    assert link.shared_bandwidth("all_reduce") is None


def test_devices_that_are_wired_to_each_other_use_the_wires_they_have() -> None:
    link = Link(bandwidth=100e9, latency=1e-6, wired=(0.25, 0.5, 1.0))
    assert [link.solo_bandwidth("send", devices) for devices in (1, 2, 3, 4, 5)] == [25e9, 25e9, 50e9, 100e9, 100e9]


def test_a_kind_of_collective_may_have_figures_of_its_own() -> None:
    link = Link(
        bandwidth=10e9, total=20e9, latency=1e-6, fraction=0.5, fractions={"send": 1.0}, latencies={"all_to_all": 7e-6}
    )
    assert (link.solo_bandwidth("send"), link.solo_bandwidth("all_reduce")) == (10e9, 5e9)
    assert (link.shared_bandwidth("send"), link.shared_bandwidth("all_reduce")) == (20e9, 10e9)
    assert (link.delay("all_to_all"), link.delay("send")) == (7e-6, 1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bandwidth": 0.0},
        {"bandwidth": -1.0},
        {"bandwidth": float("inf")},
        {"bandwidth": True},
        {"latency": -1e-6},
        {"fraction": 0.0},
        {"fraction": 1.1},
        {"switch": -0.1},
        {"wired": (0.5, 2.0)},
        {"fractions": {"reduce": 0.5}},
        {"speed": 1.0},
    ],
)
def test_a_figure_that_no_link_can_have_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Link.model_validate({"bandwidth": 1e9, "latency": 0.0} | wrong)


def test_the_presets_are_there_and_know_their_names() -> None:
    wanted = {"nvlink-2", "nvlink-3", "nvlink-4", "pcie-3", "pcie-4", "pcie-5", "loopback", "shared-memory"}
    wanted |= {"ethernet-10g", "ethernet-25g", "ethernet-100g", "infiniband-hdr-200", "infiniband-ndr-400"}
    wanted |= {"roce-200", "roce-400", "infiniband-hdr-4x200"}
    assert wanted <= set(PRESETS)
    assert all(link.kind == name for name, link in PRESETS.items())


def test_figures_of_presets_are_those_of_their_data_sheets() -> None:
    """Bytes per second of one device, in one direction."""
    sheets = {"nvlink-2": 150e9, "nvlink-3": 300e9, "nvlink-4": 450e9, "ethernet-10g": 1.25e9, "roce-400": 50e9}
    assert {name: PRESETS[name].bandwidth for name in sheets} == sheets


def test_hosts_with_one_card_share_it_and_devices_with_their_own_do_not() -> None:
    assert all(link.total == link.bandwidth for name, link in PRESETS.items() if name.startswith("ethernet"))
    assert PRESETS["infiniband-hdr-200"].total is None
    assert PRESETS["infiniband-hdr-4x200"].total == 4 * PRESETS["infiniband-hdr-4x200"].bandwidth == 100e9


def test_what_devices_are_mostly_linked_by_are_presets() -> None:
    assert usual_links()
    for device, links in usual_links().items():
        assert device in device_presets()
        assert set(links) == {"link", "hosts"}
        assert set(links.values()) <= set(PRESETS)
