"""`sparsync doctor`: report what this machine can do, what is missing, and what would not work with a script or a job."""
