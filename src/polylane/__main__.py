"""``python -m polylane``, which is also what torchrun starts: ``torchrun --nproc-per-node 2 -m polylane train ...``."""

from polylane.runtime.workers.parent_tie import tie_to_agent


def main() -> None:
    """Run the command line; before that tie a worker of torchrun's to its agent, which may die meanwhile."""
    tie_to_agent()
    from polylane.cli import main

    main()


if __name__ == "__main__":
    main()
