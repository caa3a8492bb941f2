"""Seconds of one operator on one device: operations and bytes, roofline or measured profile."""
