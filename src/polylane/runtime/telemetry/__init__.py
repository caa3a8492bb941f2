"""What workers measure of their own steps: which steps are looked at, and what every worker says of one."""
