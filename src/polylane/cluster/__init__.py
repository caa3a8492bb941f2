"""ON WHAT: devices, the links between them and the tree that they make, as data."""
