"""Custom calls: the lowering that primitives share, and the C++ extensions."""
