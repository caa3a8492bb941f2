"""Batches: their order, what each worker loads of them, and the random numbers that a dataset draws."""
