"""Plans of a whole network as a document: written, read, followed."""
