"""Networks on several devices: images split over ranks, and the mesh of ranks that is fastest."""
