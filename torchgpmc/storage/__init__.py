"""What a run leaves behind: kept draws, files that load without executing anything, checkpoints, a model's fingerprint."""
