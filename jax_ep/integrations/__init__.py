"""jax_ep inside other frameworks. Each module needs its framework when it is used, not imported."""
