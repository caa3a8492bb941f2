"""Graph capture: from model and loss to a Graph, by torch.export, with leaves where export cannot follow."""
