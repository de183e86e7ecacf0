"""Transports of one node, which carry tokens between its ranks."""
