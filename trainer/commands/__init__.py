"""The program's commands, one thin file each; the only room that knows Hydra."""

COMMANDS = {
    "train": "train a model, its controls, evaluate and report (the default command)",
    "recalibrate": "drop the encoding of a trained model and recalibrate it, in one command",
    "prepare": "turn the text of a run into tokens on disk, once, before it trains on a cluster",
    "evaluate": "measure retrieval and loss of trained checkpoints, far beyond the training length",
    "compare": "put the runs of a sweep beside each other: table, figure, page",
    "analyze": "show a model's attention geometry: clusters, sinks, entropies, features, biases",
    "generate": "continue prompts with a trained checkpoint",
    "export": "write a checkpoint as a directory that transformers loads, and compare the two",
    "plan": "say what a run will need in memory, time and disk, and whether it fits",
}
"""What the program can do; each is ``COMMAND`` in the module of its name."""
