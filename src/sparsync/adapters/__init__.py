"""sparsync in other people's trainers and dashboards; none of their packages is needed for anything else."""
