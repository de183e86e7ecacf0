"""The jitted steps (training, evaluation, sampling), on a mesh or on one device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experts import AXIS
from model import LanguageModel, ModelConfig, Routing, RunExperts

BALANCE_WEIGHT = 0.1  # of the load-balancing loss
TEMPERATURE = 0.5  # of sampling


class State(NamedTuple):
    """The state that a training step updates."""

    params: Any
    opt_state: Any


class Metrics(NamedTuple):
    """The report of a training step."""

    loss: jax.Array  # float32[]; nats per byte, excluding the load-balancing loss
    n_dropped: jax.Array  # int32[]; over all ranks and layers


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, its optimizer and the mesh that they run on.

    Without a mesh it is the reference: one device, no sharding, no `jax_ep`.
    """

    config: ModelConfig
    run_experts: RunExperts
    optimizer: optax.GradientTransformation
    mesh: Mesh | None = None

    def new_model(self) -> LanguageModel:
        """Returns the model with its initial parameters, which are always the same."""
        return LanguageModel(self.config, self.run_experts, nnx.Rngs(0))

    def new_state(self) -> State:
        """Returns the initial state, each array created on the devices that hold it."""

        def init():
            params = nnx.state(self.new_model())
            return State(params, self.optimizer.init(params))

        return jax.jit(init, out_shardings=self._shardings(jax.eval_shape(init)))()

    def put(self, windows: Any) -> jax.Array:
        """Returns `windows` on the devices, sharded over the ranks."""
        return jax.device_put(windows, self.mesh and NamedSharding(self.mesh, P(AXIS)))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def train_step(self, state: State, windows: jax.Array) -> tuple[State, Metrics]:
        """Returns the next state; donates the buffers of `state`."""
        grads, metrics = self.gradient(state.params, windows)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        state = State(optax.apply_updates(state.params, updates), opt_state)
        if self.mesh:
            state = jax.lax.with_sharding_constraint(state, self._shardings(state))
        return state, metrics

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(self, params: Any, windows: jax.Array) -> tuple[Any, Metrics]:
        """Returns the gradients of all parameters."""

        def objective(params):
            loss, routing = self._loss(params, windows)
            metrics = Metrics(loss, routing.n_dropped.sum())
            return loss + BALANCE_WEIGHT * routing.balance_loss.mean(), metrics

        return jax.grad(objective, has_aux=True)(params)

    @functools.partial(jax.jit, static_argnums=0)
    def evaluate(self, params: Any, windows: jax.Array) -> tuple[jax.Array, Routing]:
        """Returns the loss in nats per byte, and the choices of each layer's router."""
        return self._loss(params, windows)

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def sample(self, params: Any, prompts: jax.Array, n_bytes: int, key: jax.Array) -> jax.Array:
        """Returns int32[B, n_bytes], continuations of `prompts`, int32[B, context]."""
        model = self._model(params)

        def next_byte(window, key):
            logits = model(window)[0][:, -1]
            chosen = jax.random.categorical(key, logits / TEMPERATURE)
            return jnp.column_stack([window[:, 1:], chosen]), chosen

        return jax.lax.scan(next_byte, prompts, jax.random.split(key, n_bytes))[1].T

    def _model(self, params: Any) -> LanguageModel:
        return nnx.merge(nnx.graphdef(nnx.eval_shape(self.new_model)), params)

    def _loss(self, params: Any, windows: jax.Array) -> tuple[jax.Array, Routing]:
        logits, routing = self._model(params)(windows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.mean(), routing

    def _shardings(self, tree: Any) -> Any:
        """P("ep") for the experts' weights and their optimizer moments; P() for the rest."""
        if self.mesh is None:
            return None

        def sharding(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return NamedSharding(self.mesh, P(AXIS) if "/experts/" in name else P())

        return jax.tree.map_with_path(sharding, tree)
