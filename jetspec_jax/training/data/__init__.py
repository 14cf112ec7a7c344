"""Training data: rows of files, what is learnt of them, the target's answers, packing and batches."""
