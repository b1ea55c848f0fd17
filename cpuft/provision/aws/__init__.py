"""A cluster of instances that are rented from AWS. boto3 is imported in `client` alone."""
