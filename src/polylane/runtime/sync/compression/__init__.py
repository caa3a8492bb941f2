"""Gradient compression: half precision, PowerSGD, top-k, with error feedback."""
