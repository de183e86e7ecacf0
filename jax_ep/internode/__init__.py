"""Exchanges between nodes, and the transports that consist of one and of calls inside nodes."""
