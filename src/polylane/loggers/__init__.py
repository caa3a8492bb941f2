"""Loggers: what a run writes into metrics.jsonl, sent on to TensorBoard, Weights & Biases, MLflow or a user's own."""
