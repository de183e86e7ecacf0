"""The operands of dispatch and combine, checked and routed, and the facts of their rows."""
