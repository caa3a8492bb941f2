"""State of the user's own Python outside of tensors: attributes, globals, clocks, random generators."""
