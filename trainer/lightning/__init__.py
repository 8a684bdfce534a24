"""The core of the trainer for scripts of your own: a Lightning module, its data, and the drop."""

from trainer.common.schedule import schedule
from trainer.lightning.datamodule import TokenData
from trainer.lightning.drop import DropPositions
from trainer.lightning.module import LanguageModule

__all__ = ["DropPositions", "LanguageModule", "TokenData", "schedule"]
