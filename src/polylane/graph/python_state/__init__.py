"""What the user's own Python keeps and reads outside of tensors: attributes, globals, clocks, random generators."""
