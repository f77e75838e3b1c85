"""Files: a reader that never runs what it reads, atomic writes, and what a file says about itself."""
