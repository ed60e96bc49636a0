"""Every situation behind every door with every scheme: what works, and what is refused; docs/doors.md is made from it."""
