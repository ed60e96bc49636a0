"""sparsync in trainers and dashboards; each module needs the package it is for, and nothing else here needs any."""
