"""Reports of runs: the page of a run, also while it trains, and two runs beside each other."""
