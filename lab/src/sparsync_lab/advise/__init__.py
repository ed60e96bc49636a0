"""What to use on a network: predicted step times and the extra steps that a scheme costs, for a job and a probe."""
