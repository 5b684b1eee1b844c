"""What a planner holds in memory in front of wisdom: measurements, plans and fronts, and which plans it refused."""
