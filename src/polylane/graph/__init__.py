"""The computation graph of a model and its loss, and its partition into pipeline stages."""
