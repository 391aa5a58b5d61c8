"""What the models of the library share: the interface of their verbs, optimizers and schedules, and training state."""
