"""What is logged of a run: the messages of its steps, their columns, the files of metrics and of its time."""
