"""Running a training: from the start of its workers to its end, with its folder, checkpoints and restarts.

Its tests are in ``tests/commands``.
"""
