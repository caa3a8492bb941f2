"""Custom autograd functions and the user's own code: traced and tried, to prove how samples go through."""
