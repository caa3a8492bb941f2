"""Plans: the stages, meshes, schedule and synchronization that a user can choose, as a file or one line."""
