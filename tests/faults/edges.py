"""Under TSan, registers handlers through tests/sanitizers. Comes before jax_ep, which registers."""

import os

if "JAX_EP_TSAN_EDGES" in os.environ:
    import tsan_edges  # noqa: F401
