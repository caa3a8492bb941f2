"""The model and its loss as one flat graph of operators, and that graph cut into stages."""
