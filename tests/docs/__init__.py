"""The documentation's blocks of code, run as its readers would run them."""
