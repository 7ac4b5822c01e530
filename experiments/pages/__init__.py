"""Tables, plots and reports, made from the results of runs."""
