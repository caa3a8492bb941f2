"""``polylane verify`` of a script: run plainly and prepared, and compared by what it prints and by its weights.

Its tests are in ``tests/cli``.
"""
