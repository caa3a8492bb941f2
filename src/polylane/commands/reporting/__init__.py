"""Reports of runs: the page of a run, two runs beside each other, and what was predicted of a run before it began."""
