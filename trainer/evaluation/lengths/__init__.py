"""Every method on every model in every task at every length, on the same trials."""
