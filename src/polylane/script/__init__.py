"""Ordinary training loops under any plan: what a script computes is recorded, and run by the plan's programs."""
