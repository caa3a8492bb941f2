"""Worker processes: launch, rendezvous, failure reports and shutdown."""
