"""What trials of faults share: the processes of their ranks, and the pages of what was found."""
