"""ZeRO: optimizer states, gradients and parameters sharded over replicas (Rajbhandari et al., SC 2020)."""
