"""Trainings, worlds of ranks and command lines that tests start: threads, forked workers, forked processes."""
