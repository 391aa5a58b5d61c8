"""The size of the tiles in which our own kernels compute rows: the tables of captured passes are made for it."""

TILE_ROWS = 64  # rows of one sequence, or of one request, that a program of a kernel takes at a time
