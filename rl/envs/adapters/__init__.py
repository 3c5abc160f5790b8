"""Other libraries' environments as Envs of ours, each in a file; docs/environments.md has the table."""
