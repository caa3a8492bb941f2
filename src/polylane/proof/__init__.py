"""What a proof is made of: the reference, what counts as rounding, and where two runs part ways."""
