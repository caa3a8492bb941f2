"""Figures with units."""

import pytest

from polylane.cluster.figures import EXAMPLES, figure


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("80 GB", 80e9, "size"),
        ("80GB", 80e9, "size"),
        ("16 GiB", 16 * 2**30, "size"),
        ("512 B", 512, "size"),
        ("25 GB/s", 25e9, "rate"),
        ("200 Gb/s", 25e9, "rate"),
        ("100 Gbit/s", 12.5e9, "rate"),
        ("5 us", 5e-6, "time"),
        ("5 µs", 5e-6, "time"),
        ("0.3ms", 0.3e-3, "time"),
        ("2 s", 2.0, "time"),
        ("312 TFLOP/s", 312e12, "flops"),
        ("1e9", 1e9, None),
        ("  .5 ", 0.5, None),
        ("-3 GB/s", -3e9, "rate"),
    ],
)
def test_a_figure_is_its_number_in_plain_units(text: str, value: float, dimension: str | None) -> None:
    assert figure(text) == (pytest.approx(value, rel=1e-15), dimension)


@pytest.mark.parametrize(
    "text", ["", "fast", "25 GB/h", "25 gigabytes", "1,5 GB", "GB", "1e999 GB", "nan", "inf", "1 2"]
)
def test_what_is_no_figure_is_none(text: str) -> None:
    assert figure(text) is None


def test_microseconds_are_the_numbers_that_one_would_write() -> None:
    assert figure("5 us") == (5e-6, "time")
    assert figure("14 us") == (14e-6, "time")


def test_every_example_measures_what_it_says() -> None:
    for dimension, text in EXAMPLES.items():
        found = figure(text)
        assert found is not None
        assert found[1] == dimension
