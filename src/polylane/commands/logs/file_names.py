"""File names: what the files of a run's folder are called, for those who write and those who read them."""

MODEL = "model.safetensors"
PLAN = "plan.yaml"
RUN = "run.json"  # the options of a recipe's run
METRICS = "metrics.jsonl"
GOODPUT = "goodput.json"
PREDICTED = "predicted.json"
TIMELINE = "timeline.json"  # of a typical step
TIMELINES = "timelines.json"  # of all steps that are kept
TRACE = "trace.json"  # the typical step, for ui.perfetto.dev
SWIMLANE = "swimlane.html"
REPORT = "report.html"
WHY = "why.json"  # of a run that did not end well

UNFINISHED = "unfinished"  # name of the folder in which a run writes while an earlier run's files are there

# All files of a run, in the order in which they are renamed: the weights first, since they are worth the most.
NAMES = (MODEL, PLAN, RUN, METRICS, GOODPUT, PREDICTED, TIMELINE, TIMELINES, TRACE, SWIMLANE, REPORT)
ALL_NAMES = (*NAMES, WHY)  # with that of a run that did not end well
