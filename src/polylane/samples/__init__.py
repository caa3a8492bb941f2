"""May a batch be split? What is proven of every value of a captured graph, for all inputs."""
