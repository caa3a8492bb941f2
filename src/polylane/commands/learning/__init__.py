"""What a run learns of its gradient noise while it trains: the log of it, and batches that grow by it.

Tests: ``tests/commands/learning``.
"""
