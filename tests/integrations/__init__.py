"""Every situation with every integration and scheme: what works, and what is refused. docs/what_works.md shows it as a table."""
