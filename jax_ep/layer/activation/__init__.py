"""fused_silu: its interface, primitives and derivatives."""
