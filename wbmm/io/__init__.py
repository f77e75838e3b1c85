"""Files: the reader that never runs what it reads, and what a file says of its own contents."""
