"""What all benchmarks share: the registry, settings, results, published layers and the two sides of a comparison."""
