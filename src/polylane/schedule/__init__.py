"""In which order: actions and the schedules that arrange them."""
