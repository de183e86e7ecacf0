"""How processes meet to open and close groups: all of them, or none."""
