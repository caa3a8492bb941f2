"""Proof of checkpoints: a training that resumes from one equals the uninterrupted one."""
