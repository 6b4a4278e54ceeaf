"""Even load of the experts: losses, counts over a step, and the bias of the selection."""
