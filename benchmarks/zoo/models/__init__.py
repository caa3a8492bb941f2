"""The models of the zoo, a file for each family of them."""
