"""Communication between ranks: exchanges of tensors, sums, agreement, and news of failures."""
