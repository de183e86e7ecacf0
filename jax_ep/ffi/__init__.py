"""Custom calls: primitives, their lowering, and the C++ extensions behind them."""
