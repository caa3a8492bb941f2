"""Plans: what a user can choose of stages, meshes, schedule and synchronization, as a file or one line."""
