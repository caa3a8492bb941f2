"""ZeRO: gradients, optimizer state and parameters cut over replicas (Rajbhandari et al., SC 2020)."""
