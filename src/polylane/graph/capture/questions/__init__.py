"""What a model's Python asks of the data while it is captured: answered from the batch at hand, and asked again."""
