"""WHAT is computed: a model and its loss as one flat graph."""
