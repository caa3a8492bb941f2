"""The commands, a file each: what a command line asks for, done and printed."""
