"""Memory of a step: what autograd saves, how long it lives, what an optimizer keeps, and the peak."""
