"""What calls take, their primitives and derivatives, asynchronous calls, and facts of rows."""
