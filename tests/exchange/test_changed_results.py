"""Results of dispatch that a program changes: the call fails, and says so; the next group works."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest

import cases
import jax_ep
import suite
from harness import AXIS, config_of, make_mesh, on_mesh, put

pytestmark = pytest.mark.usefixtures("one_process")
TIMEOUT_S = 6.0
FAR = 2**30  # no rank, token or row
UNCHANGED = "dispatched must be the unchanged result of a dispatch of this group; "
MESSAGES = {
    "host": f"combine of group .*: {UNCHANGED}",
    "p2p": rf"{UNCHANGED}that of rank \d was changed \(.*combine: ",
}
# In the handle of `host`, the row of a choice; in that of `p2p`, the number of messages from a
# rank, and the row of a message.
CHANGES = {
    "all of the handle": ("handle", lambda x: x + FAR),
    "the first number of the handle": ("handle", lambda x: set_at(x, 0, FAR)),
    "the lowest number": ("handle", lambda x: set_at(x, 0, -(2**31))),
    "a row": ("handle", lambda x: set_at(x, jax.lax.axis_size(AXIS) + 1, FAR)),
    "row_offsets": ("row_offsets", lambda x: x + jnp.uint32(FAR)),
}


def set_at(x: jax.Array, i: int, value: int) -> jax.Array:
    return x.ravel().at[i].set(value).reshape(x.shape)


@pytest.fixture(params=[1, 2])
def case(request):
    """Formats that pad groups count their padding in row_offsets."""
    return cases.SMALL[request.param].replace(row_alignment=4, weights="source")


def make_layer(group, field: str, change):
    """A layer whose Dispatched is changed, and its gradients."""

    def loss(tokens, weights, topk_ids):
        dispatched = jax_ep.dispatch(group, tokens, topk_ids)
        changed = {field: change(getattr(dispatched, field))}
        dispatched = dataclasses.replace(dispatched, **changed)
        out = jax_ep.combine(group, dispatched.tokens, dispatched, weights)
        return jnp.sum(out.astype(jnp.float32))

    return on_mesh(group.mesh, jax.value_and_grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize(("field", "change"), CHANGES.values(), ids=CHANGES)
def test_a_changed_result_of_dispatch_fails_the_call(case, field, change, transport):
    if transport == "xla":
        pytest.skip("xla has no handlers; XLA clamps the indices")
    mesh = make_mesh(case.n_ranks)
    tokens, topk_ids, weights, *_ = put(mesh, *suite.make_inputs(case).arrays())
    config = config_of(case, timeout_s=TIMEOUT_S)
    with jax_ep.ep_init(mesh, AXIS, config, transport) as group:
        layer = make_layer(group, field, change).compile(tokens, weights, topk_ids)
        begin = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError, match=MESSAGES[transport]):
            jax.block_until_ready(layer(tokens, weights, topk_ids))
            group.check()
        assert time.monotonic() - begin < TIMEOUT_S + 2
    suite.check(case, transport, mesh)
