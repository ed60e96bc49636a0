"""Code shared by tests: programs that train, streams of gradients, processes and checks. No tests here."""
