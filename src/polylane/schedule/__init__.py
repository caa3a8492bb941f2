"""Pipeline schedules: the order in which every stage runs its forward and backward passes."""
