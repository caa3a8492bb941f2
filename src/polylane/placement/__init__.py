"""HOW one operator is split: placements, the moves between them, the rules of every operator, and the rewrite."""
