"""The computations of a layer between dispatch and combine, on rows grouped by expert."""
