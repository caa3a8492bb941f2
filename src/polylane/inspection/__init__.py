"""Reports on a graph or a plan without running it: stages, traffic, placements, utilization of a schedule."""
