"""What all recognisers share: keys, features, encoder, labels, streams, search and graphs."""
