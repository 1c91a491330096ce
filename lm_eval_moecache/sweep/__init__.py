"""Many runs from one file: a grid or list of cells, each written once, resumed after a kill."""
