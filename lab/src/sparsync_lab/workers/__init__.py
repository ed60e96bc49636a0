"""One worker process per rank, for comparisons and benchmarks: `group` starts, reads and stops them, `process` is their main function."""
