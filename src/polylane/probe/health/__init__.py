"""Health of the hosts of a training: facts of every worker, what they reach of each other, and what is wrong."""
