"""What fragments of code in the documentation take as given, by the name of their ``setup``."""
