"""Swimlanes: a timeline drawn as text, SVG, HTML or a Chrome trace."""
