"""Transports, which carry tokens between ranks: one module per transport."""
