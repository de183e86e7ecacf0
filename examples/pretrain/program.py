"""The state of training and the jitted step that updates it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from model import Transformer


class Metrics(NamedTuple):
    """The report of a step."""

    loss: jax.Array  # float32[], nats per token, without the losses of the routers
    balance_loss: jax.Array  # float32[], mean over layers
    z_loss: jax.Array  # float32[], mean over layers
    grad_norm: jax.Array  # float32[], before it is clipped
    n_dropped: jax.Array  # int32[], rows over all layers and devices
    expert_load: jax.Array  # int32[L, E], choices over all tokens


def make_optimizer(
    learning_rate: float, n_warm_up: int, n_steps: int
) -> optax.GradientTransformation:
    """Returns AdamW with warm-up, cosine decay to a tenth, and gradients clipped to a norm of 1."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0,
        peak_value=learning_rate,
        warmup_steps=n_warm_up,
        decay_steps=max(n_steps, n_warm_up + 1),
        end_value=0.1 * learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1)
    )


class Program:
    """A model with its optimizer: how their state comes to be and changes.

    Args:
        create_model: from random numbers.
        optimizer: of all parameters.
        mesh: that the parameters are on.
        balance_weight: of the load-balancing loss.
        z_weight: of the router's z-loss.
        seed: of the initial parameters.
    """

    def __init__(
        self,
        create_model: Callable[[nnx.Rngs], Transformer],
        optimizer: optax.GradientTransformation,
        mesh: jax.sharding.Mesh,
        *,
        balance_weight: float,
        z_weight: float,
        seed: int,
    ):
        def create():
            model = create_model(nnx.Rngs(seed))
            return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        self.balance_weight, self.z_weight = balance_weight, z_weight
        # Shapes, dtypes and shardings of the state; also what a checkpoint is restored to.
        self.graph, self.abstract_state = nnx.get_abstract_model(create, mesh)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        # In jit, every device creates the shards that it holds.
        self.new_state = jax.jit(lambda: nnx.state(create()), out_shardings=shardings)
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))

    @property
    def n_params(self) -> int:
        """Returns the number of parameters."""
        model, _ = nnx.merge(self.graph, self.abstract_state)
        return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))

    def _step(self, state: nnx.State, windows: jax.Array) -> tuple[nnx.State, Metrics]:
        model, optimizer = nnx.merge(self.graph, state)

        def objective(model: Transformer) -> Any:
            loss, routing = model(windows)
            balance, z = routing.balance_loss.mean(), routing.z_loss.mean()
            return loss + self.balance_weight * balance + self.z_weight * z, (loss, routing)

        grads, (loss, routing) = nnx.grad(objective, has_aux=True)(model)
        optimizer.update(model, grads)
        metrics = Metrics(
            loss=loss,
            balance_loss=routing.balance_loss.mean(),
            z_loss=routing.z_loss.mean(),
            grad_norm=optax.tree.norm(grads).astype(jnp.float32),
            n_dropped=routing.n_dropped.sum(),
            expert_load=routing.expert_load,
        )
        return nnx.state((model, optimizer)), metrics
