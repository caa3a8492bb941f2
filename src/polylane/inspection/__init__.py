"""Reports on a plan without running it: stages, traffic, theory of a schedule."""
