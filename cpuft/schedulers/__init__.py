"""A launch as a job of somebody's scheduler: its text, from one pure function each; and what submits that."""
