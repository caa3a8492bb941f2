"""Data parallelism of a graph: may a batch be split, and how do the parts of a batch make up every value?"""
