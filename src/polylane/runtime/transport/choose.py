"""Choice of transport: shared memory inside a host, torch.distributed between hosts and between GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from polylane.errors import PolylaneError
from polylane.runtime.transport import c10d
from polylane.runtime.transport.hierarchical import HierarchicalConnections
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.transport.shared_memory.hub import MessageHub
from polylane.runtime.transport.shared_memory.rendezvous import (
    HostRendezvous,
    WorkerCard,
    connect_hub,
    why_no_shared_memory,
)
from polylane.runtime.transport.staged import StagedConnections
from polylane.runtime.workers.world import World

VARIABLE = "POLYLANE_TRANSPORT"
CHOICES = ("gloo", "shared_memory")

Connect = Callable[..., Transport]


def choose_transport(world: World) -> Connect:
    """Return the constructor of a world's transports, the same kind on all workers; a collective of the workers.

        workers                                    transport
        all on CPUs of one host                    shared memory
        on CPUs of several hosts, more than one    hierarchical: shared memory inside a host, torch.distributed
        worker on any of them                      between hosts
        on accelerators that some of them share    one of the above between their hosts' memories, values copied there
                                               and back (:mod:`.staged`)
    others                                     torch.distributed (NCCL)

    The environment variable ``POLYLANE_TRANSPORT`` forces one: ``gloo`` torch.distributed alone, ``shared_memory`` that
    all workers share the memory of one host.

    Returns:
        A constructor with the arguments of :class:`.c10d.C10dTransport`, to be called in the same order at all workers.
        Its transports share their connections, which are closed with the last one.

    Raises:
        PolylaneError: the variable has an unknown or differing value, or names a transport that is not possible here.
    """
    if world.is_staged:
        return StagedConnections(choose_transport(world.on_host()), world.device)
    request = os.environ.get(VARIABLE) or None
    if world.size == 1 or world.backend is None:
        _refuse_unknown(request)
        return c10d.C10dTransport
    # The decision depends on all workers' cards, which are equal everywhere: so all decide alike.
    meeting = HostRendezvous.meet_workers(world, request)
    try:
        _refuse_different([card.requested_transport for card in meeting.cards])
        reason = why_no_shared_memory(meeting.cards)
        hosts = [card.host for card in meeting.cards]
        if request != "gloo" and (reason is None or (request is None and _shares_memory_in_hosts(meeting.cards))):
            met = connect_hub(world, meeting, hosts)
            if isinstance(met, MessageHub):
                return HierarchicalConnections(world, met, hosts)
            reason = met
    finally:
        # Also if shared memory is not used: no socket or folder may be left behind.
        meeting.stop_listening()
    if request == "shared_memory":
        raise PolylaneError(f"{VARIABLE}=shared_memory cannot be: {reason}; leave it out, and gloo is used")
    return c10d.C10dTransport


def _shares_memory_in_hosts(cards: Sequence[WorkerCard]) -> bool:
    """Return whether workers can share memory inside each host, and any host has several."""
    able = all(card.why_unable is None and card.user == cards[0].user for card in cards)
    return able and len({card.host for card in cards}) < len(cards)


def _refuse_different(requests: Sequence[str | None]) -> None:
    for request in requests:
        _refuse_unknown(request)
    for rank, request in enumerate(requests):
        if request != requests[0]:
            raise PolylaneError(
                f"{VARIABLE} is {requests[0] or 'not set'} at rank 0 and {request or 'not set'} at rank {rank}: "
                "set it to the same at all of them, or nowhere"
            )


def _refuse_unknown(value: str | None) -> None:
    if value and value not in CHOICES:
        raise PolylaneError(f"{VARIABLE}={value} is no transport: say {' or '.join(CHOICES)}, or leave it out")
