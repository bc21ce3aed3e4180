"""What other tools talk to, a folder each."""
