"""Transports: tensors between workers, over torch.distributed or shared memory, behind one interface."""
