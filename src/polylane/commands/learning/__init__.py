"""What a run learns of its gradient noise: whether it is measured, batches that grow by it, advice on other batches.

Tests: ``tests/commands/learning``.
"""
