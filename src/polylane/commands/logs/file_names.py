"""File names: what the files of a run's folder are called, for those who write and those who read them."""

MODEL = "model.safetensors"
METRICS = "metrics.jsonl"
GOODPUT = "goodput.json"
PREDICTED = "predicted.json"
REPORT = "report.html"
WHY = "why.json"  # of a run that did not end well

UNFINISHED = "unfinished"  # name of the folder in which a run writes while an earlier run's files are there
