"""Transports: point-to-point messages and collectives over torch.distributed or shared memory, behind one interface."""
