"""Code that the library's models share: the interface of their verbs, optimizers and schedules, and training state."""
