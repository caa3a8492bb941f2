"""What polylane computes, once more by another way: slow, plain, or measured."""
