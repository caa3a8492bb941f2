"""Runtime: runs a compiled training on torch.distributed; the job, and the roles of its workers."""
