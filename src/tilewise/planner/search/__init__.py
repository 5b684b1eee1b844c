"""The search for one problem's plan: estimates, trials, cuts, checks."""
