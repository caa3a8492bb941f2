"""Worker processes: how they start, find each other, fail and end."""
