"""See it: timelines, swimlanes, metrics and reports."""
