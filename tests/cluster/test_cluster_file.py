"""Cluster files: what may stand in them, and what is said of what may not."""

from pathlib import Path

import pytest

from polylane import yaml_file
from polylane.cluster.catalogue import device_presets, link_presets
from polylane.cluster.cluster import Cluster
from polylane.cluster.cluster_file import dump, from_mapping, load
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.cluster.rank_span import Level
from polylane.errors import PolylaneError

PRESETS = """\
polylane: 1
hosts:
  - {count: 2, devices: 8, device: a100-80g, link: nvlink-3, rack: r0, site: paris}
  - {count: 1, devices: 4, device: v100, link: nvlink-2, rack: r1, site: paris, speed: 0.9, price: 1.5}
  - {device: cpu, cores: 2, site: rome, contention: {2: 0.9, 4: 0.7}}
links: {hosts: infiniband-hdr-200, racks: ethernet-100g, sites: ethernet-10g}
speeds: {3: 0.8}
"""

FIGURES = """\
hosts:
- count: 2
  devices: 2
  device:
    kind: mine
    memory: 80 GB
    flops: {bfloat16: 300 TFLOP/s}
    achieved: {bfloat16: 2.0e+14}
    bandwidth: 2 TB/s
    overhead: 5 us
  link: {bandwidth: 25 GB/s, latency: 5us, local: 100 GB/s, half: 1 MB}
links:
  hosts: {preset: ethernet-10g, latency: 1 ms, latencies: {send: 200 us}}
"""


def read(text: str) -> Cluster:
    return from_mapping(yaml_file.parse(text))


def test_presets_are_said_by_their_names() -> None:
    cluster = read(PRESETS)
    assert (cluster.count, cluster.host(cluster.count - 1) + 1) == (21, 4)
    assert cluster.hosts[0].device == Device.model_validate(device_presets()["a100-80g"])
    assert cluster.link(range(8)) == Link.model_validate(link_presets()["nvlink-3"])
    assert cluster.link(range(16)).kind == "infiniband-hdr-200"
    assert cluster.level((0, 16)) == Level.SITE
    assert cluster.level((0, 20)) == Level.CLUSTER
    assert (cluster.cores(20), cluster.device(16).speed, cluster.device(16).price) == (2, 0.9, 1.5)
    assert cluster.device(3).speed == 0.8


def test_figures_may_have_units_and_a_preset_may_be_changed() -> None:
    cluster = read(FIGURES)
    device, link, hosts = cluster.device(0), cluster.link((0, 1)), cluster.link((0, 2))
    assert (device.kind, device.memory, device.bandwidth, device.overhead) == ("mine", 80 * 10**9, 2e12, 5e-6)
    assert (device.flops["bfloat16"], device.achieved["bfloat16"]) == (3e14, 2e14)
    assert (link.bandwidth, link.latency, link.local, link.half) == (25e9, 5e-6, 100e9, 1e6)
    assert (hosts.bandwidth, hosts.latency, hosts.latencies) == (1.25e9, 1e-3, {"send": 200e-6})


@pytest.mark.parametrize("text", [PRESETS, FIGURES])
def test_a_cluster_that_is_written_and_read_is_the_same(text: str) -> None:
    cluster = read(text)
    assert read(dump(cluster)) == cluster
    assert dump(read(dump(cluster))) == dump(cluster)


def test_what_equals_a_preset_is_written_by_its_name() -> None:
    text = dump(read(PRESETS))
    assert "device: a100-80g" in text
    assert "racks: ethernet-100g" in text
    assert "kind: ethernet-10g" in dump(read(FIGURES)), "a preset that was changed is written with its figures"


WRONG = {
    "hosts.0.link.bandwidth is missing": "hosts: [{devices: 2, device: cpu, link: {latency: 1 us}}]",
    "hosts.0.link.bandwidth must be above 0, not '-3 GB/s'": (
        "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwidth: -3 GB/s}}]"
    ),
    "hosts.0.link.latency must be at least 0, not -1": (
        "hosts: [{devices: 2, device: cpu, link: {latency: -1, bandwidth: 3 GB/s}}]"
    ),
    "hosts.0.link.bandwidth must be a rate, such as 25 GB/s, not 'fast'": (
        "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwidth: fast}}]"
    ),
    "hosts.0.link.bandwidth must be a rate, such as 25 GB/s, not '3 GB'": (
        "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwidth: 3 GB}}]"
    ),
    "hosts.0.link.bandwidth must be a rate, such as 25 GB/s, not [1]": (
        "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwidth: [1]}}]"
    ),
    "hosts.0.link.latencies.send must be a time, such as 5 us, not True": (
        "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwidth: 1, latencies: {send: true}}}]"
    ),
    "hosts.0.link.fraction must be at most 1, not 1.5": (
        "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwidth: 1, fraction: 1.5}}]"
    ),
    "hosts.0.link.bandwidth is empty": "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwidth: }}]",
    "hosts.0.link is empty": "hosts: [{devices: 2, device: cpu, link: }]",
    "hosts.0.link: there is no preset 'nvlink3', known are nvlink-2, *; did you mean nvlink-3?": (
        "hosts: [{devices: 2, device: cpu, link: nvlink3}]"
    ),
    "hosts.0.link.preset: there is no preset 'nvlink3', known are nvlink-2, *; did you mean nvlink-3?": (
        "hosts: [{devices: 2, device: cpu, link: {preset: nvlink3, latency: 0}}]"
    ),
    "hosts.0.device: there is no preset 'a100-80', known are *; did you mean a100-80g?": "hosts: [{device: a100-80}]",
    "hosts.0.link.bandwith is not a key of a cluster; known there are kind, bandwidth, *; did you mean bandwidth?": (
        "hosts: [{devices: 2, device: cpu, link: {latency: 0, bandwith: 1}}]"
    ),
    "hosts.0.device is missing": "hosts: [{devices: 2}]",
    "hosts.0.device must be a mapping of keys and values, not 3": "hosts: [{device: 3}]",
    "hosts.0.device.memory is missing": "hosts: [{device: {flops: {float32: 1 TFLOP/s}, bandwidth: 1 GB/s}}]",
    "hosts.0.device.memory must be a size, such as 80 GB, not 'much'": "hosts: [{device: {memory: much}}]",
    "hosts.0.device.flops.float32 must be a rate of operations, such as 312 TFLOP/s, not '5 GB'": (
        "hosts: [{device: {memory: 1 GB, flops: {float32: 5 GB}, bandwidth: 1 GB/s}}]"
    ),
    "hosts.0.device.colour is not a key of a cluster; known there are *": (
        "hosts: [{device: {preset: cpu, colour: red}}]"
    ),
    "hosts.0.gpus is not a key of a cluster; known there are count, devices, device, *": (
        "hosts: [{device: cpu, gpus: 8}]"
    ),
    "hosts.0.count must be at least 1, not 0": "hosts: [{device: cpu, count: 0}]",
    "hosts.0.devices must be a whole number, not 2.5": "hosts: [{device: cpu, devices: 2.5}]",
    "hosts.0.cores must be at least 1, not -1": "hosts: [{device: cpu, cores: -1}]",
    "hosts.0.contention.2 must be at most 1, not 1.5": "hosts: [{device: cpu, contention: {2: 1.5}}]",
    "hosts.0.speed must be above 0, not 0": "hosts: [{device: cpu, speed: 0}]",
    "hosts.0.price must be at least 0, not -1": "hosts: [{device: cpu, price: -1}]",
    "hosts.0.speed must be a finite number, not inf": "hosts: [{device: cpu, speed: .inf}]",
    "hosts.0.speed must be at most 1e+24, not 1e+200": "hosts: [{device: cpu, speed: 1.0e+200}]",
    "hosts.0.speed must be at least 1e-18, not 1e-200": "hosts: [{device: cpu, speed: 1.0e-200}]",
    "hosts.0.count must be at most 1,048,576, not 9223372036854775808": (
        "hosts: [{device: cpu, count: 9223372036854775808}]"
    ),
    "hosts.0.device.misaligned must be at most 8, not 200": "hosts: [{device: {preset: cpu, misaligned: 200}}]",
    "hosts.0.rack must be a name, in quotes where it reads like a number ('3'), not 3": (
        "hosts: [{device: cpu, rack: 3}]"
    ),
    "hosts.1 must be a mapping of keys and values, not 'cpu'": "hosts: [{device: cpu}, cpu]",
    "hosts must be a list, not {'device': 'cpu'}": "hosts: {device: cpu}",
    "hosts: there must be at least one": "hosts: []",
    "hosts is missing": "links: {}",
    "host is not a key of a cluster; known there are polylane, hosts, links, speeds; did you mean hosts?": (
        "host: [{device: cpu}]"
    ),
    "links.host is not a key of a cluster; known there are hosts, racks, sites; did you mean hosts?": (
        "{hosts: [{device: cpu}], links: {host: ethernet-10g}}"
    ),
    "links must be a mapping of keys and values, not 'ethernet-10g'": "{hosts: [{device: cpu}], links: ethernet-10g}",
    "hosts.0.link is missing: nothing links the 2 devices of a host": "hosts: [{device: cpu, devices: 2}]",
    "links.hosts is missing: nothing links the 3 hosts of a rack": "hosts: [{device: cpu, count: 3}]",
    "speeds.1: there is no such device, they are 0 to 0": "{hosts: [{device: cpu}], speeds: {1: 0.5}}",
    "speeds.0 must be above 0, not -2": "{hosts: [{device: cpu}], speeds: {0: -2}}",
    "speeds.a must be a whole number, not 'a'": "{hosts: [{device: cpu}], speeds: {a: 1}}",
    "polylane must be 1, not 2": "{polylane: 2, hosts: [{device: cpu}]}",
    "there is nothing in it": "",
    "this is not a mapping of keys and values": "[1, 2]",
    "this is not YAML: *": "hosts: [",
    "device is there twice, on lines 1 and 1: keep one": "hosts: [{device: cpu, device: v100}]",
}


@pytest.mark.parametrize(("sentence", "text"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_is_said_in_one_sentence_with_the_file_and_the_key(
    sentence: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(PolylaneError) as caught:
        load(path)
    said = str(caught.value)
    before, _, after = sentence.partition("*")
    assert said.startswith(f"{path}: {before}")
    assert said.endswith(after)
    assert "*" in sentence or said == f"{path}: {sentence}"
    assert "\n" not in said


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolylaneError, match=r"cluster\.yaml: No such file"):
        load(tmp_path / "cluster.yaml")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolylaneError, match=r"cluster\.yaml: "):
        load(path)
