"""What a prepared script's loaders read: of each batch the samples that a worker computes on, or all of them."""
