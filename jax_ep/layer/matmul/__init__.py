"""Grouped matmuls: rows times the weights of their expert, alone or with the activation."""
