"""plan="auto": the best plan for the workers that are here, found by rank 0 and sent to all."""
