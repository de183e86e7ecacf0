"""Inter-node exchanges, and the transports that consist of one and of intra-node calls."""
