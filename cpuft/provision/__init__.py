"""Makes clusters: gather facts, plan what is missing, execute the plan, and repeat until nothing is missing."""
