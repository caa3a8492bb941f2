"""Running a training on torch.distributed: the job, and what its workers do."""
