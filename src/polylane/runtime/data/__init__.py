"""Data loading: the order of samples, the local samples of each worker, and reproducible augmentation."""
