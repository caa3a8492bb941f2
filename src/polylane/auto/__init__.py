"""plan="auto": the best plan for the workers that are here, found by one of them and told to all."""
