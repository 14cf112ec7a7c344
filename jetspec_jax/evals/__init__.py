"""Measurements on prompt sets: acceptance length, speed, and losslessness."""
