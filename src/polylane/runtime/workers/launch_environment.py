"""Launch environment: which worker this process is, as the launcher that has started it says in the environment.

Without a launcher a process is alone, or starts its workers itself (:mod:`.team`). A row of :data:`LAUNCHERS` reads
what one launcher says, in torchrun's variables, so that torch's own rendezvous can read them as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polylane.errors import PolylaneError

# The variables of torchrun by which workers know their ranks and meet: a dataset may take a share of its samples by it.
VARIABLES = (
    *(f"{of}{number}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for number in ("RANK", "WORLD_SIZE")),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)


def read_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun, or of a launcher that sets the same; none without RANK."""
    return {name: environment[name] for name in VARIABLES if name in environment} if "RANK" in environment else {}


# What launchers say, in torchrun's variables: the first that has started this process counts.
LAUNCHERS: tuple[Callable[[Mapping[str, str]], dict[str, str]], ...] = (read_torchrun,)


@dataclass(frozen=True)
class Launch:
    """How this process was started: as a launcher's worker, or by nothing that has others.

    Attributes:
        is_worker: whether a launcher has started this process, as one of its workers.
        rank: rank of this worker among all workers, from 0.
        size: number of workers on all hosts.
        local_rank: rank of this worker among those of its host, from 0.
        local_size: number of workers on this host.
    """

    is_worker: bool = False
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0, as one that is alone: of all workers it writes files and prints."""
        return self.rank == 0

    @classmethod
    def of_process(cls) -> Launch:
        """Read how this process was started.

        Raises:
            PolylaneError: what the launcher says is incomplete.
        """
        variables = next(filter(None, (read(os.environ) for read in LAUNCHERS)), None)
        if variables is None:
            return cls()
        os.environ.update(variables)  # as torch's own rendezvous reads them
        rank = read_number("RANK")
        local_size = read_number("LOCAL_WORLD_SIZE", default=1)
        return cls(True, rank, read_number("WORLD_SIZE"), read_number("LOCAL_RANK", default=rank), local_size)


def is_launched() -> bool:
    """Return whether a launcher has started this process as one of its workers."""
    return any(read(os.environ) for read in LAUNCHERS)


def read_number(name: str, default: int | None = None) -> int:
    """Return the number in a variable of the environment.

    Args:
        name: name of the variable, such as WORLD_SIZE.
        default: the number where it is not set; None: it must be.

    Raises:
        PolylaneError: it is not set, or no whole number.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        problem = "is not set" if text is None else f"is {text!r}, not a whole number"
        if "RANK" not in os.environ:
            raise PolylaneError(f"{name} {problem}: unset it, or start the workers with torchrun") from None
        raise PolylaneError(
            f"RANK is set but {name} {problem}: start the workers with torchrun, or unset RANK"
        ) from None


def is_first_of_host() -> bool:
    """Return whether this process says what all workers of its host have to say; so does one that is alone."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def hide_ranks() -> None:
    """Remove from this process's environment what tells the user's code that it is one of several workers."""
    for name in VARIABLES:
        os.environ.pop(name, None)
