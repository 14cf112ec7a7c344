"""Many requests at once: a scheduler over the slots of a running batch, and an HTTP server in front of it."""
