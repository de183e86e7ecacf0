"""fused_silu: the activation between an expert's two matmuls, quantized in one pass."""
