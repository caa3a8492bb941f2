"""Programs: the actions of every worker in one step, lowered from a plan; simulator and runtime run the same ones."""
