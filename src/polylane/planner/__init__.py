"""The planner: stages, meshes, microbatches and sharding that train fastest (inter-operator)."""
