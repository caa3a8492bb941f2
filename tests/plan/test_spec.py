"""One-line plans: what they say, and one sentence naming the key for everything that is wrong with one."""

from dataclasses import replace

import pytest

from polylane.errors import PolylaneError
from polylane.plan.recompute import format_recompute, parse_recompute
from polylane.plan.spec import Degrees, Spec, parse


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("data=1", Spec()),
        ("data=2", Spec(data=2)),
        ("data=2,pipeline=3", Spec(data=2, pipeline=3)),
        (" pipeline = 4 , schedule = afab ,", Spec(pipeline=4, schedule="afab")),
        ("microbatches=8,precision=bfloat16", Spec(microbatches=8, precision="bfloat16")),
        ("data=2,pipeline=2,schedule=naive,microbatches=1", Spec(2, 2, schedule="naive", microbatches=1)),
        ("tensor=4", Spec(tensor=4)),
        ("data=2,sequence=2,tensor=3,pipeline=4", Spec(data=2, pipeline=4, tensor=3, sequence=2)),
    ],
)
def test_what_a_line_says(text: str, spec: Spec) -> None:
    assert parse(text) == spec


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("full", "full"),
        ("budget:2GB", "budget:2GB"),
        ("default:selective", "selective"),
        ("blocks.3:full + blocks.5:selective", {"blocks.3": "full", "blocks.5": "selective"}),
        ("default:full+blocks.0:budget:1.5MB", {"default": "full", "blocks.0": "budget:1.5MB"}),
        ("budget:full", {"budget": "full"}),
    ],
)
def test_what_is_recomputed(text: str, rule: str | dict[str, str]) -> None:
    assert parse(f"data=2,recompute={text}").recompute == rule
    assert parse_recompute(format_recompute(rule)) == rule


def test_workers_are_the_product() -> None:
    assert parse("data=3,pipeline=4").workers == 12 and Spec().workers == 1
    assert parse("data=2,sequence=3,tensor=5,pipeline=7").workers == 210


def test_microbatches_are_left_open() -> None:
    assert parse("pipeline=2").microbatches is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data", "'data' is not of the form key=value"),
        ("recompute=some", "recompute=some must be none, selective, full, or a budget such as budget:200MB"),
        (
            "recompute=a:some",
            "recompute=a:some must be none, selective, full, or a budget such as budget:200MB, or one of",
        ),
        ("recompute=a:full+full", "for each module, as in blocks.3:full+default:none"),
        ("recompute=a:full+a:none", "recompute=a:full+a:none names a twice: keep one"),
        ("recompute=budget:5s", "recompute=budget:5s must be none, selective, full, or a budget"),
        (
            "dat=2",
            "unknown key 'dat', known are data, pipeline, sequence, tensor, microbatches, chunks, schedule, "
            "replicas, vertical_sync, precision, recompute, every, warmup, outer, shard, within, wire, "
            "compress, servers, dedicated, staleness, per_sample, compile, shares",
        ),
        ("data=2,shares=2:1:1", "shares=2:1:1 is of 3 replicas, and every stage must have so many, not data=2"),
        ("[data=2 | 1],shares=2:1", "shares=2:1 is of 2 replicas, and every stage must have so many, not data=2 and"),
        ("data=2,shares=1:0", "shares=0 must be a whole number of at least 1"),
        ("dat=2", "; did you mean data?"),
        ("tensors=2", "unknown key 'tensors', known are data, pipeline, sequence"),
        ("tensors=2", "did you mean tensor?"),
        ("tensor=0", "tensor=0 must be a whole number of at least 1"),
        ("sequence=half", "sequence=half must be a whole number"),
        ("data=2,data=3", "data is given twice"),
        ("data=0", "data=0 must be a whole number of at least 1"),
        ("pipeline=-1", "pipeline=-1 must be a whole number"),
        ("pipeline=two", "pipeline=two must be a whole number"),
        ("microbatches=1.5", "microbatches=1.5 must be a whole number"),
        ("data=²", "data=² must be a whole number"),
        ("data=٣", "data=٣ must be a whole number"),
        ("data=00", "data=00 must be a whole number of at least 1"),
        ("", "nothing is said: give degrees, as in data=2,pipeline=2"),
        (" , ,", "nothing is said"),
        ("tensor=99999999999", "tensor=99999999999 is more than 1,048,576, the most that a plan can have"),
        ("microbatches=1048577", "microbatches=1048577 is more than 1,048,576"),
        ("data=1024,tensor=2048", "data=1024 times tensor=2048 would be more than 1,048,576 workers, the most"),
        ("data=", "'data=' is not of the form key=value"),
        ("schedule=gpipe", "schedule=gpipe is not known, known are naive, afab, 1f1b"),
        ("data=2,replicas=in-turn", "replicas=in-turn is not known, known are split, round-robin"),
        ("precision=float8", "precision=float8 is not known, known are float32, bfloat16, float16"),
    ],
)
def test_what_is_wrong_with_a_line(text: str, says: str) -> None:
    with pytest.raises(PolylaneError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"plan {text!r}: ") and "\n" not in str(caught.value)


def test_a_million_workers_are_not_counted_one_by_one() -> None:
    assert parse("data=1024,tensor=1024").workers == 2**20
    with pytest.raises(PolylaneError, match="data=99999999999 would be more than 1,048,576 workers"):
        Spec(data=99999999999)


def test_what_is_too_long_to_read_is_cut() -> None:
    for text in ("tensor=" + "9" * 6000, "x" * 6000, "schedule=" + "x" * 6000):
        with pytest.raises(PolylaneError) as caught:
            parse(text)
        assert len(str(caught.value)) < 350


# Stages with meshes of their own


def test_degrees_are_those_of_the_stages() -> None:
    spec = Spec(microbatches=1, stages=(Degrees(), Degrees(2), Degrees(1, 3, 4)))
    assert (spec.data, spec.pipeline, spec.sequence, spec.tensor, spec.workers) == (2, 3, 3, 4, 15)
    assert spec == parse("[1 | data=2 | sequence=3,tensor=4],microbatches=1")
    assert Spec(pipeline=2, stages=(Degrees(), Degrees(2))).data == 2
    assert replace(spec, schedule="afab").meshes == spec.meshes


def test_stages_that_are_alike_are_degrees() -> None:
    assert Spec(stages=(Degrees(2),) * 3) == Spec(data=2, pipeline=3) == parse("[data=2 | data=2 | data=2]")
    assert Spec(stages=(Degrees(tensor=4),)) == Spec(tensor=4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data": 3}, "data=3 cannot be combined with stages of which the most have data=2"),
        ({"pipeline": 3}, "pipeline=3 cannot be combined with 2 stages"),
        ({"tensor": 2}, "tensor=2 cannot be combined with stages of which the most have tensor=1"),
    ],
)
def test_degrees_that_contradict_the_stages(given: dict[str, int], says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        Spec(stages=(Degrees(), Degrees(2)), **given)  # type: ignore[arg-type]


def test_samples_are_divided_anew_where_replicas_differ() -> None:
    lines = ("[data=2 | 1]", "[1 | tensor=2]", "data=2,pipeline=2", "[data=2 | data=2,tensor=2]")
    assert [parse(line).resplits_batch for line in lines] == [True, False, False, False]
