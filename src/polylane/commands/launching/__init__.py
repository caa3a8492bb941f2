"""``polylane launch``: what the launchers of a cluster are given, filled in from a plan."""
