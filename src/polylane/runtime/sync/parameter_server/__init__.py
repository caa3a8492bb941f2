"""Parameter servers: workers push gradients to them and pull weights from them (Li et al., OSDI 2014)."""
