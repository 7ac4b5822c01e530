"""Tables, plots, reports and progress, made from the results of runs."""
