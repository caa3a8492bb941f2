"""``python -m polylane``, which is also what torchrun starts: ``torchrun --nproc-per-node 2 -m polylane train ...``."""

from polylane.cli import main

if __name__ == "__main__":
    main()
