"""One worker process per rank: `group` starts, reads and stops them, `process` is their main function."""
