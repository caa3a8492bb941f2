"""Capture: model and loss -> Graph, by torch.export, with leaves where export cannot follow."""
