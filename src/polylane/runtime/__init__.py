"""Do it: start the workers, run their programs, move their tensors."""
