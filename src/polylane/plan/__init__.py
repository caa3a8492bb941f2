"""THE CHOICE, as data: which stages, which devices, in which order."""
