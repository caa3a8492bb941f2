"""What a job, a step's result, a timeline and a plan show of themselves: in a line, and in a notebook's cell."""

from __future__ import annotations

import base64
from dataclasses import replace
from xml.etree import ElementTree

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.observe.swimlane.notebook_cell import MOST_SPANS, draw_cell
from polylane.observe.timeline import Timeline
from polylane.plan.spec import parse
from polylane.runtime.job import Job
from tests.support.runs import make_theory
from tests.support.workers.training import batch_of, classify, mlp, sgd, workers


def look(job: Job) -> list[str]:
    """Return what objects of a training show, seen by one worker at a time: nobody waits for the others."""
    result = job.step(batch_of(8))
    waiting = repr(result) if not result.is_complete else "<StepResult: step 0, 8 samples, still being summed>"
    result.wait_complete()
    return [waiting, repr(result), result._repr_html_(), repr(job), job._repr_html_(), repr(result.timeline)]


def test_a_training_shows_itself() -> None:
    waiting, result, cell, job, job_cell, timeline = workers(look, mlp(6, 8, 4), "pipeline=2,microbatches=2")[1]
    assert waiting == "<StepResult: step 0, 8 samples, still being summed>"
    assert result.startswith("<StepResult: step 0, 8 samples, loss 1.")
    assert "data:image/svg+xml;base64," in cell and "<th" in cell
    assert "rank 1, step 1>" in job and "<td style='text-align: left'>1</td>" in job_cell
    assert timeline.startswith("<Timeline: 'measured', 2 ranks, ") and timeline.endswith("% computing>")


def test_a_timeline_is_a_picture_of_its_own() -> None:
    """Its styles are not those of the notebook's page, and a hostile title is text."""
    timeline = replace(make_theory(2, 1, 4), title="<b>'\"&")
    cell = draw_cell(timeline)
    assert timeline._repr_html_() == cell and "<b>" not in cell and "<style" not in cell
    picture = cell.split("base64,")[1].split('"')[0]
    assert ElementTree.fromstring(base64.b64decode(picture)).tag.endswith("svg")
    many = Timeline(timeline.spans * (MOST_SPANS // len(timeline.spans) + 1), 2)
    assert "<img" not in draw_cell(many) and "<img" not in draw_cell(Timeline((), 0))
    assert repr(timeline) == "<Timeline: '<b>\\'\"&', 2 ranks, 16 spans, 0.06 seconds, 80.0% computing>"


def test_a_plan_shows_its_stages() -> None:
    problem = TrainingProblem(mlp(6, 8, 4), build_objectives(classify, sgd, None), batch_of(8))
    plan = compile_training(problem, parse("data=2,pipeline=2,microbatches=2")).plan
    assert repr(plan) == f"<Plan: {plan.spec}, 4 workers>"
    assert plan._repr_html_().count("<tr>") == 3 and plan.spec in plan._repr_html_()
