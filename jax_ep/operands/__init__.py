"""What dispatch and combine take, checked and routed, and what their rows are."""
