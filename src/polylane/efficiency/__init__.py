"""Statistical efficiency: the gradient noise scale, how sure it is, and what it says of batches and learning rates."""
