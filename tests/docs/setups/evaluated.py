"""A model, its test data, an evaluation, and a tracker that keeps what it is told."""

from types import SimpleNamespace

model, test_loader = None, []
logged = []
tracker = SimpleNamespace(log=logged.append)


def evaluate(model, loader):
    return 0.9
