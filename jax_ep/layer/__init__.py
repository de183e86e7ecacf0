"""What a layer computes between dispatch and combine, on rows grouped by expert."""
