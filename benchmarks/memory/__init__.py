"""Bytes that schedules keep alive, against theory, and trainings under a limit of memory."""
