"""The step as the goal: a model's whole step, timed with its plans and without them in turns."""
