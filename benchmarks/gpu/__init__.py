"""Everything that a machine with a GPU can show: the same measurements run on the CPU, beside it."""
