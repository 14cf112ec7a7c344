"""Training of draft heads: prompt pool, answers of the target, cached features, loss, loop and export."""
