"""Channels between workers and servers: a server that has failed says so to all, whoever has not read before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from polylane.runtime.sync.parameter_server.messages import MessageHead, MessageKind, RemoteChannel


class NeverRead:
    """A message whose receiver waits for somebody else."""

    def wait(self) -> Tensor:
        raise AssertionError("waited for a message that nobody reads")


class Recorder:
    """A transport that only notes what is sent."""

    def __init__(self) -> None:
        self.sent = list[Tensor]()

    def send(self, tensor: Tensor, peer: int) -> Any:
        self.sent.append(tensor)
        return NeverRead()


def test_the_last_message_does_not_wait_for_those_before_it() -> None:
    transport: Any = Recorder()
    channel = RemoteChannel(transport, threading.Lock(), 1, 2, "waiting")
    channel.put(MessageHead(MessageKind.ANSWER), [torch.ones(3)])
    channel.put_last(MessageHead(MessageKind.FAILED))
    kinds = [MessageHead.of_tensor(sent).kind for sent in transport.sent if sent.dtype is torch.uint8]
    assert kinds == [MessageKind.ANSWER, MessageKind.FAILED]
    with pytest.raises(AssertionError, match="nobody reads"):
        channel.put(MessageHead(MessageKind.ANSWER))
