"""A user's callback with state, which processes started by torchrun can import."""

import lightning as L
import torch

from trainer.training.optimizers import global_norm


class Counting(L.Callback):
    """Counts steps, and keeps a number and a tensor of the weights, which may be sharded."""

    def __init__(self):
        self.steps, self.sum, self.norm = 0, 0.0, torch.zeros(())

    def state_dict(self):
        return {"steps": self.steps, "sum": self.sum, "norm": self.norm}

    def load_state_dict(self, state_dict):
        self.steps, self.sum = state_dict["steps"], state_dict["sum"]
        self.norm = state_dict["norm"]

    def on_train_batch_end(self, trainer, module, *_):
        self.steps += 1
        weight = module.model.embed_tokens.weight.detach()
        self.norm = weight.norm()
        self.sum += global_norm([weight]).item()
        module.log("own/norm", self.norm)
