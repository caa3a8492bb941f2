"""Predicted against measured steps on this machine, and how long planning takes."""
