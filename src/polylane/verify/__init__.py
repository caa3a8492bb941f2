"""The proof: a plan against one device, step by step, in float64."""
