"""Gradients that a loss takes inside itself (torch.autograd.grad), as operators of the captured graph."""
