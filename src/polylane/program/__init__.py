"""Programs: the actions of every worker in one step, lowered from a plan, the same for simulator and runtime."""
