"""Pipeline schedules: in which order every stage runs its forward and backward passes."""
