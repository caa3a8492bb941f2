"""Clusters in one line."""

from pathlib import Path

import pytest

from polylane.cluster.cluster_file import dump
from polylane.cluster.rank_span import Level
from polylane.cluster.spec import load_or_parse, parse
from polylane.errors import PolylaneError


def test_hosts_devices_and_what_they_are() -> None:
    cluster = parse("16x8:a100-80g")
    assert (cluster.host(cluster.count - 1) + 1, cluster.count, cluster.device(0).kind) == (16, 128, "a100-80g")
    assert cluster.link(range(8)).kind == "nvlink-3"
    assert cluster.link(range(128)).kind == "infiniband-hdr-200"


def test_one_host() -> None:
    cluster = parse("8:h100-80g")
    assert (cluster.host(cluster.count - 1) + 1, cluster.count, cluster.level(range(8))) == (1, 8, Level.HOST)
    assert parse("1x8:h100-80g") == cluster


def test_links_and_the_rest_may_be_said() -> None:
    cluster = parse(" 4 x 2 : gtx-1080-ti , hosts=ethernet-25g, link=pcie-4, cores=1, price=0.25, speed=0.5")
    assert (cluster.link((0, 1)).kind, cluster.link((0, 2)).kind) == ("pcie-4", "ethernet-25g")
    assert (cluster.cores(0), cluster.price, cluster.device(7).speed) == (1, 8 * 0.25, 0.5)


def test_sites_have_as_many_hosts_each() -> None:
    cluster = parse("2x4x8:a100-80g,sites=internet-1g")
    assert (cluster.host(cluster.count - 1) + 1, cluster.count) == (8, 64)
    assert [cluster.level(pair) for pair in ((0, 7), (0, 31), (0, 32))] == [Level.HOST, Level.RACK, Level.CLUSTER]
    assert [cluster.link(pair).kind for pair in ((0, 31), (0, 32))] == ["infiniband-hdr-200", "internet-1g"]
    assert parse("1x4x8:a100-80g") == parse("4x8:a100-80g")


def test_a_single_device_needs_no_link() -> None:
    assert parse("1:cpu").count == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8", "'8' is not of the form [SITESx]HOSTSxDEVICES:DEVICE, as in 16x8:a100-80g"),
        ("", "'' is not of the form [SITESx]HOSTSxDEVICES:DEVICE"),
        ("-1:cpu", "'-1:cpu' is not of the form [SITESx]HOSTSxDEVICES:DEVICE"),
        ("2x:cpu", "'2x:cpu' is not of the form [SITESx]HOSTSxDEVICES:DEVICE"),
        ("0:cpu", "devices must be from 1 to 1,048,576, not '0'"),
        ("0x8:cpu", "hosts must be from 1 to 1,048,576, not '0'"),
        ("9999999999:cpu", "devices must be from 1 to 1,048,576"),
        ("1048576x8:cpu", "1048576 hosts of 8 devices are more than 1,048,576 devices, the most there can be"),
        ("8:a100-80", "there is no device 'a100-80', known are "),
        ("8:a100-80", "did you mean a100-80g?"),
        ("64:h100", "did you mean h100-80g or h100-96g-500w?"),
        ("2x2x8:a100-80g", "sites is missing: say what links the sites, as in sites=internet-1g"),
        ("2x2x8:a100-80g,sites=internet", "sites: there is no preset 'internet', known are "),
        ("0x2x8:a100-80g", "sites must be from 1 to 1,048,576, not '0'"),
        ("1024x1024x8:cpu,sites=internet-1g", "1024 sites of 1024 hosts of 8 devices are more than 1,048,576"),
        ("8:cpu,hosts", "'hosts' is not of the form key=value, as in hosts=ethernet-25g"),
        ("8:cpu,hosts=", "'hosts=' is not of the form key=value"),
        (
            "8:cpu,host=ethernet-10g",
            "unknown key 'host', known are link, hosts, sites, cores, speed, price; did you mean hosts?",
        ),
        ("8:cpu,cores=1,cores=2", "cores is given twice"),
        ("2x8:cpu,hosts=ethernet-10", "hosts: there is no preset 'ethernet-10', known are "),
        ("8:cpu,link=nvlink", "link: there is no preset 'nvlink'"),
        ("8:cpu,cores=0", "cores must be at least 1, not 0"),
        ("8:cpu,cores=two", "cores must be a whole number, not 'two'"),
        ("8:cpu,speed=fast", "speed must be a number, not 'fast'"),
        ("8:cpu,speed=-1", "speed must be above 0, not -1.0"),
        ("8:cpu,speed=nan", "speed must be a finite number, not nan"),
        ("8:cpu,price=-1", "price must be at least 0, not -1.0"),
    ],
)
def test_what_is_wrong_is_said_with_the_line_and_the_key(text: str, sentence: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        parse(text)
    said = str(caught.value)
    assert said.startswith(f"cluster {text!r}: ")
    assert sentence in said
    assert "\n" not in said


def test_a_file_may_stand_where_a_line_may(tmp_path: Path) -> None:
    cluster = parse("2x8:a100-40g,speed=0.75")
    for name in ("cluster.yaml", "cluster"):
        path = tmp_path / name
        path.write_text(dump(cluster))
        assert load_or_parse(str(path)) == cluster
    assert load_or_parse("2x8:a100-40g,speed=0.75") == cluster
    with pytest.raises(PolylaneError, match=r"nowhere\.yaml: No such file"):
        load_or_parse(str(tmp_path / "nowhere.yaml"))
