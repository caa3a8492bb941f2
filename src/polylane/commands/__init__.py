"""Commands of the command line, one module each, with what they share: requests, user inputs, printing."""
