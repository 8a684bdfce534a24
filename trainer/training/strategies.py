"""Lightning's strategies for a run: their checkpoints are the run's directories."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from trainer.checkpoint import (
    Tensors,
    Writer,
    join_tensors,
    optimizer_tensors,
    read_state,
    readers,
    restore,
    split_tensors,
)
from trainer.common.processes import current_ranks
from trainer.lightning.module import LanguageModule
from trainer.lightning.strategy import StrategyName
from trainer.training.internals import join_without_mesh


class RunStrategy(Strategy):
    """Saves what Lightning and its callbacks put into a checkpoint as the directory of a run.

    Weights and optimizer state are read in place, each rank its shards, after the model has been
    distributed. The progress of Lightning's loops is not stored: it follows from the step.

    ``writer``, ``describe`` (see :class:`~trainer.training.run.RunCallback`): set before a fit.
    """

    writer: Writer
    describe: Callable[[], dict[str, Any]]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Distribute the model first."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Leave the optimizer to :meth:`load_checkpoint`."""
        return False

    @property
    def module(self) -> LanguageModule:
        """Module of the run."""
        return cast("LanguageModule", self.lightning_module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the parameters, this rank's shards of them."""
        return self.module.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by parameter names."""
        return dict(optimizer_tensors(self.module.model, optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint beside training; a run's directory takes no ``storage_options``."""
        if storage_options is not None:
            raise TypeError("storage_options: a run writes its own directories")
        tensors: Tensors = dict(checkpoint.pop("state_dict"))
        for state in checkpoint.pop("optimizer_states", ()):
            tensors |= state
        layout = checkpoint.pop("layout")
        del checkpoint["loops"]
        described = split_tensors(checkpoint, "lightning", tensors)
        run = self.describe() | {"layout": layout, "lightning": described}
        self.writer.save(Path(filepath), tensors, run)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore weights and optimizer, and return the rest."""
        path = Path(checkpoint_path)
        state = read_state(path)
        restore(self.module.model, self.optimizers[0], path)
        checkpoint = join_tensors(state["lightning"], readers(path))
        return checkpoint | {
            "global_step": state["step"],
            "pytorch-lightning_version": L.__version__,  # nothing of its own format is stored
            "state_dict": self.module.state_dict(),
            "layout": state["layout"],
            "lr_schedulers": [],
        }

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has restored the weights."""

    def teardown(self) -> None:
        """End a fit; Lightning would copy weights and optimizer state to the host first."""
        self.model = self.lightning_module  # without DDP around it
        assert self.accelerator is not None
        self.accelerator.teardown()


class SingleDevice(RunStrategy, SingleDeviceStrategy):
    """One process."""


class DDP(RunStrategy, DDPStrategy):
    """A copy of the model on every rank."""


class Sharded(RunStrategy, ModelParallelStrategy):
    """FSDP2 over all ranks, or within groups (HSDP); ``setup.distribute`` shards the model."""

    def setup_environment(self) -> None:
        """Join the process group; the module has its own device mesh."""
        join_without_mesh(self)


def make_strategy(name: StrategyName, device: torch.device, deterministic: bool) -> RunStrategy:
    """Create the strategy of that name for this process's ``device``; ``deterministic``: gradients
    are summed in the same order in every step."""
    if name == "single":
        return SingleDevice(device)
    strategy: DDP | Sharded
    if name == "ddp":
        strategy = DDP(
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            # Ranks have the same weights; a broadcast on DDP's own stream could follow a resume.
            init_sync=False,
            # Otherwise the first step has other buckets than the rest, thus another order of sums.
            find_unused_parameters=deterministic,
        )
    else:
        strategy = Sharded(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    # Lightning takes the entry at the local rank, and would expect the GPUs of all processes.
    strategy.parallel_devices = [device] * current_ranks().local_size
    return strategy
