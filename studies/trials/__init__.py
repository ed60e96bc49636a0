"""The shared parts of fault trials: the processes of their ranks, and the pages of their results."""
