"""The proof of metrics: those of a plan equal those of a plain loop on one device."""
