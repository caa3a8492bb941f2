"""A file per operator family: which placements its operators admit."""
