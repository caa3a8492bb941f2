"""THE CHOOSING: placements inside a stage, by an integer program."""
