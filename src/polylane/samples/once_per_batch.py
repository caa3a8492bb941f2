"""Once per batch: buffers that a forward moves by what is the same for all samples, such as a counter of its calls.

One device moves such a buffer once for a batch. Here each microbatch moves a copy of what the buffer was before the
step, and writes the result: every microbatch reads and writes the same values, so that the buffer moves once.

    batch_start = whole_batch(buffer)    the buffer before the step's first pass
    own         = clone(batch_start)     which all of the forward's reads and writes of the buffer mean
    copy_(buffer, own)                   behind the last of them
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from polylane.graph.nodes.memory import alias_groups, written_arguments
from polylane.graph.operators.whole_batch_counts import CombineParts, WholeBatchStatistic


def find_buffer_users(code: fx.Graph, name: str) -> tuple[fx.Node, list[fx.Node]]:
    """Return the placeholder of a buffer, and all operators that see its memory, in order.

    Args:
        code: FX graph of the model and loss, unsharded.
        name: the buffer's name in the model.
    """
    groups = alias_groups(code)
    buffer = next(n for n in code.nodes if n.op == "placeholder" and n.meta["role"] == ("buffer", name))
    members = {node for node, root in groups.items() if root is groups[buffer]}
    alias_users = {user for member in members for user in member.users} | members
    return buffer, [node for node in code.nodes if node in alias_users and node.op == "call_function"]


def find_settled_buffers(code: fx.Graph, memory: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the buffers of which each part writes what it computes from their values before the step.

    What is written must not depend on memory that each part moves further. That it is the same for all parts is another
    question, which the states of the values answer.

    Args:
        code: FX graph of the model and loss, unsharded.
        memory: for every node the first node whose memory its value may share.
    """
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in code.nodes:
        for argument in written_arguments(node):
            writers.setdefault(memory[argument], []).append(node)
    settled = {buffer for buffer, writes in writers.items() if _is_settled(buffer, writes)}
    while True:
        moved = {node for node in writers if node.op == "placeholder"} - settled
        sound = {buffer for buffer in settled if not _sources(writers[buffer][0], memory, writers) & moved}
        if sound == settled:
            return settled
        settled = sound


def _is_settled(buffer: fx.Node, writers: Collection[fx.Node]) -> bool:
    if buffer.op != "placeholder" or len(writers) != 1:
        return False
    (write,) = writers
    other_users = [user for user in buffer.users if user is not write]
    return (
        str(write.target) == "aten.copy_.default"
        and write.args[0] is buffer
        and isinstance(write.args[1], fx.Node)
        and not write.users
        and all(is_batch_start(user) for user in other_users)
    )


def _sources(
    write: fx.Node, memory: Mapping[fx.Node, fx.Node], writers: Mapping[fx.Node, Collection[fx.Node]]
) -> set[fx.Node]:
    """Return all nodes that a write's value depends on, those included that write the memory of any of them."""
    sources, pending = {write}, [write]
    while pending:
        node = pending.pop()
        new_sources = {*node.all_input_nodes, *writers.get(memory[node], ())} - sources
        sources |= new_sources
        pending += new_sources
    return sources


def is_batch_start(node: fx.Node) -> bool:
    """Return whether a node stands for a buffer's value before the step."""
    return isinstance(node.target, WholeBatchStatistic) and node.target.combine is CombineParts.SAME
