"""Parameter servers: weights that workers fetch and send gradients to (Li et al., OSDI 2014)."""
