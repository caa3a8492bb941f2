"""What a training reaches in samples and in seconds: by batch, and on stale weights."""
