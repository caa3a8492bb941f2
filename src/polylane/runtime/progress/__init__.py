"""Progress: what every worker says of where it is, and the watch over it."""
