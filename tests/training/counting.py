"""A user's callback with state, which processes started by torchrun can import."""

import lightning as L

from trainer.lightning.optimizers import global_norm


class Counting(L.Callback):
    """Counts steps, and keeps numbers of the weights, which may be sharded."""

    def __init__(self):
        self.steps, self.sum, self.norm = 0, 0.0, 0.0

    def state_dict(self):
        return {"steps": self.steps, "sum": self.sum, "norm": self.norm}

    def load_state_dict(self, state_dict):
        self.steps, self.sum = state_dict["steps"], state_dict["sum"]
        self.norm = state_dict["norm"]

    def on_train_batch_end(self, trainer, module, *_):
        self.steps += 1
        weight = module.model.embed_tokens.weight.detach()
        self.norm = global_norm([weight]).item()
        self.sum += self.norm
        module.log("own/norm", self.norm)
