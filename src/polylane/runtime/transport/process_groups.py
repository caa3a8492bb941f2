"""The process groups of one transport over torch.distributed: made by all workers together, destroyed with it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

from polylane.runtime.transport import protocol
from polylane.runtime.workers.world import TIMEOUT, World, make_group_options

# What a process group is for, in its description, which NCCL's logs and recordings show.
GROUP, CHANNEL = "group", "channel"
# The most thread blocks of a message's kernel. Each has a multiprocessor for itself until the message has been taken:
# by default up to 32 of an H100's 132, which the passes beside it need.
CHANNEL_BLOCKS = 8


@dataclass
class ProcessGroups:
    """The process groups of one transport.

    Attributes:
        world: the transport's workers; they may be a part of a larger default group.
        channels: by (sender, receiver), the group of a channel and the peer's rank in that group.
        sums: group of each declared set of ranks, by the ranks in ascending order.
        control: group that carries objects and barriers, over the CPU.
        made: groups that this transport made, and must destroy.
    """

    world: World
    channels: dict[protocol.Channel, tuple[dist.ProcessGroup, int]] = field(default_factory=dict)
    sums: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    control: dist.ProcessGroup | None = None
    made: list[dist.ProcessGroup] = field(default_factory=list)

    def make_group(
        self, ranks: Sequence[int], backend: str | None = None, description: str = GROUP
    ) -> dist.ProcessGroup:
        """Make a new process group; a collective over the whole world.

        Args:
            ranks: ranks of its members in the default group.
            backend: its c10d backend; default: the world's.
            description: what it is for; the channels of NCCL have few thread blocks.
        """
        is_member, is_part = dist.get_rank() in ranks, self.world.group is not None
        most_blocks = CHANNEL_BLOCKS if description == CHANNEL else None
        options = make_group_options(backend or self.world.backend, most_blocks)
        make = self.world.new_part_group if is_part else partial(dist.new_group, timeout=TIMEOUT)
        label = f"{description} {list(ranks)}"
        group: dist.ProcessGroup = make(list(ranks), backend=backend, pg_options=options, group_desc=label)
        if is_member or is_part:
            self.made.append(group)
        if is_member:
            self.world.authenticate_group(group)
        return group

    @property
    def everyone(self) -> dist.ProcessGroup:
        """Process group of all workers of the world."""
        group = self.world.group or dist.group.WORLD
        assert group is not None  # a world of more than one worker has joined one
        return group

    def destroy_groups(self) -> None:
        """Destroy the groups made here, and drop references to all others.

        A group that is still alive when the interpreter exits may abort the process: one of gloo's threads then
        releases a Python tensor too late.
        """
        for group in self.made:
            with contextlib.suppress(ValueError):  # already destroyed with the world's
                dist.destroy_process_group(group)
        self.made.clear()
        self.channels.clear()
        self.sums.clear()
        self.control = None
