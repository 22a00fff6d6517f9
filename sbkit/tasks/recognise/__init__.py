"""What recognisers share, whatever their loss and their search: keys, features to encoder, labels, windows, graphs."""
