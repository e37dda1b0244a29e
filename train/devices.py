"""Where a run's arrays are: on one device, or on a mesh."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv41.config import ModelConfig
from dsv41.sharding import make_mesh, parse_mesh
from train.layout import from_stored, init_on, place_batch, state_leaves, stored_target, to_stored
from train.step import TrainState, init_state


class Devices:
    """The devices of a run. ``mesh`` is None for one device, where arrays are what a checkpoint holds.

    text: as `dsv41.sharding.parse_mesh` reads it, None for one device. active_rows: as for `init_state`.
    """

    def __init__(self, text: str | None, config: ModelConfig, active_rows: int = 0):
        self.mesh = None if text is None else make_mesh(parse_mesh(text))
        self._config, self._active = config, active_rows
        self._leaves = state_leaves(init_state, config) if self.mesh else None

    def init(self, seed: int) -> TrainState:
        """The state before the first step."""
        if self.mesh is None:
            # Bound to its device, as what a checkpoint gives back is: a resumed run has the same program, compiled already.
            return jax.device_put(init_state(self._config, seed, self._active), jax.devices()[0])
        return init_on(self.mesh, init_state, self._config, seed)

    def place(self, batch: Any, accumulate: int = 1) -> Any:
        """A batch of numpy arrays, the same in every process."""
        return jax.tree.map(jnp.asarray, batch) if self.mesh is None else place_batch(batch, self.mesh, accumulate)

    def target(self) -> Any:
        """What `Checkpoints.restore` needs of the state."""
        if self.mesh is None:
            return jax.eval_shape(lambda: init_state(self._config, 0, self._active))
        return stored_target(self._leaves, self.mesh)

    def stored(self, state: TrainState) -> Any:
        """A state as checkpoints hold it."""
        return state if self.mesh is None else to_stored(state, self._leaves, self.mesh)

    def restored(self, state: Any) -> TrainState:
        """A state of a checkpoint."""
        return state if self.mesh is None else from_stored(state, self._leaves, self.mesh)
