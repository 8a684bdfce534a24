"""Lightning: the module, its optimizers, phases and strategies, and the callbacks."""
