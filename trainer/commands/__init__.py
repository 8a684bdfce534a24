"""The program's commands; the only room that knows Hydra."""
