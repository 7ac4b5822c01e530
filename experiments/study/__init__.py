"""`python -m experiments study`: which scheme is best, at learning rates chosen for each."""
