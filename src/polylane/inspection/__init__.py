"""Reports of a captured model and of a plan for it, as plain data: what ``polylane inspect`` shows."""
