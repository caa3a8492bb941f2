"""``plan="auto"``: measure a model's operators on this machine, compare plans by prediction, and take the best one."""
