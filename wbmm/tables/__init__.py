"""`wbmm table`: what is measured of each row of the paper's tables."""
