"""What ranks say to each other: exchanges of boxes of tensors, sums, agreement, and news of failure."""
