"""Tables, pages and estimates, which are made from the records of runs."""
