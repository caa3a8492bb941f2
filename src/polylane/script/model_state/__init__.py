"""What a prepared script's models and optimizers keep between its steps: weights, buffers, Python state, moments."""
