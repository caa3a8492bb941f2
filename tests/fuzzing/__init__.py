"""Fuzzing: what somebody mistypes, and what somebody else has prepared, as input of the commands.

Every input must end well, or with exit code 2 and one sentence; within bounds of time and memory.
"""
