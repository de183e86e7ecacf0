"""What carries tokens between ranks: one module per transport."""
