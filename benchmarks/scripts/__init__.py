"""Training scripts that others have written, prepared: see :mod:`benchmarks.scripts.__main__`."""
