"""Schedule checks: where a plan has stages, and what its replicas and updates cannot be, by its schedule."""

from __future__ import annotations

from collections.abc import Sequence

from polylane.errors import PolylaneError
from polylane.plan.sync import SyncOptions
from polylane.schedule.round_robin import WARM_UPS
from polylane.schedule.schedules import ASYNCHRONOUS, FOUND, assign_stages


def check_chunks(title: str, schedule: str, groups: Sequence[int], first_chunks: Sequence[int]) -> None:
    """Refuse stages on other workers than the schedule gives them to.

    Args:
        title: what errors call the plan.
        schedule: name of the plan's schedule.
        groups: the group of workers that has each stage, from 0.
        first_chunks: the first stage of every group.

    Raises:
        PolylaneError: it names the first stage that is on other workers.
    """
    # All workers have as many stages as the others, or no schedule but auto fits.
    chunks, remainder = divmod(len(groups), len(first_chunks))
    try:
        assignment = None if remainder else assign_stages(schedule, len(first_chunks), chunks)
    except ValueError as error:
        raise PolylaneError(f"{title}: stages: {error}") from None
    if groups != assignment:
        stage = 0 if assignment is None else next(s for s in range(len(groups)) if groups[s] != assignment[s])
        why = (
            f"{len(groups)} stages on {len(first_chunks)} groups of workers, some with more than others"
            if assignment is None
            else f"stage {stage} is on the workers of stage {first_chunks[groups[stage]]}, and the schedule {schedule} "
            f"has it on those of stage {first_chunks[assignment[stage]]}"
        )
        raise PolylaneError(f"{title}: stages: {why}")


def check_turns(title: str, replicas: Sequence[int], schedule: str, microbatches: int, sync: SyncOptions) -> None:
    """Refuse what replicas that compute whole microbatches in turn cannot have.

    Args:
        title: what errors call the plan.
        replicas: number of replicas of every stage.
        schedule, microbatches, sync: those of the plan.

    Raises:
        PolylaneError: a replica without a microbatch, a synchronization inside of passes, or a schedule that needs as
            many replicas of every stage.
    """
    label, count = f"{title}: replicas: round-robin", max(replicas)
    if microbatches < count:
        raise PolylaneError(
            f"{label}: {count} replicas cannot compute microbatches: {microbatches} in turn: give {count} or more, or "
            "take replicas: split"
        )
    check_plain_sum(label, sync)
    # A search orders the passes of groups of workers, and replicas in turn are not one another's copies in time.
    if schedule == FOUND:
        raise PolylaneError(f"{label} needs a named schedule: {schedule} finds orders for replicas that do the same")
    if len(set(replicas)) > 1 and schedule not in WARM_UPS:
        raise PolylaneError(
            f"{label}: schedule: {schedule} needs as many replicas of every stage: give all the same data, or take one "
            f"of {', '.join(WARM_UPS)}"
        )
    # An update is a mean over microbatches: replicas with fewer of them would count for more.
    if schedule in ASYNCHRONOUS and microbatches % count:
        raise PolylaneError(
            f"{label}: under schedule: {schedule} replicas have as many microbatches of every update each: "
            f"microbatches: {microbatches} is no multiple of data={count}"
        )


def check_plain_sum(label: str, sync: SyncOptions) -> None:
    """Refuse replicas in turn that do anything but sum their gradients.

    Args:
        label: what errors begin with: the plan's key.
        sync: how the replicas synchronize.

    Raises:
        PolylaneError: it is not the plain sum.
    """
    if not sync.is_plain_sum:
        raise PolylaneError(
            f"{label}: sync ({','.join(sync.to_words())}) is for replicas that split every microbatch: leave sync out, "
            "or take replicas: split"
        )


def check_asynchronous(title: str, schedule: str, sync: SyncOptions) -> None:
    """Refuse what an asynchronous pipeline cannot have.

    Args:
        title: what errors call the plan.
        schedule, sync: those of the plan.

    Raises:
        PolylaneError: replicas do not sum gradients as they are.
    """
    if schedule in ASYNCHRONOUS and not sync.is_plain_sum:
        raise PolylaneError(
            f"{title}: sync ({','.join(sync.to_words())}): under schedule: {schedule} replicas sum the gradients of "
            "every update: leave sync out"
        )


def check_accumulation(title: str, stages: int, microbatches: int, turns: int) -> None:
    """Refuse fewer microbatches than PipeDream-2BW needs.

    Args:
        title: what errors call the plan.
        stages: number of stages of the pipeline.
        microbatches: number of microbatches of a batch.
        turns: those of them that one worker computes on.

    Raises:
        PolylaneError: an update would come after the first forward pass that needs it.
    """
    # Two versions of the weights are enough only if an update comes before the batch after the next one.
    if turns < stages - 1:
        min_microbatches = (stages - 1) * -(-microbatches // turns)
        raise PolylaneError(
            f"{title}: microbatches: {microbatches}: schedule: pipedream-2bw of {stages} stages needs at least "
            f"{min_microbatches}, so that an update is there when the next batch but one begins"
        )
